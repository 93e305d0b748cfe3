"""Angles against float64, far out and in every type; what rotary scores may and may not depend on."""

import dataclasses

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import BFLOAT16, FAR, FLOAT32

import jaxformer as jf
from jaxformer import positions
from jaxformer.positions import ADD, frequencies, sinusoidal

HALF_ULP = 2**-8  # rounding to bfloat16 of a number of at most 1


def rotary(x, at, **fields):
    """x turned as a Rotary of these fields says."""
    return positions.rotary(x, at, frequencies(jf.Rotary(**fields), x.shape[-1]))


def unit_pairs(H, dtype="float32"):
    """x [1 1 1 H] whose turn is (cos, sin) of every angle."""
    return jnp.concatenate([jnp.ones(H // 2), jnp.zeros(H // 2)]).astype(dtype)[None, None, None]


@pytest.mark.parametrize("position", [0, 1, 3, 63])
@pytest.mark.parametrize("base", [100.0, 10000.0, 500000.0])
def test_rotary_is_the_oracles(position, base, rng):
    x = rng.normal(size=(2, 3, 2, 8)).astype(np.float32)
    at = position + np.array([[0, 1, -1], [-1, 0, 5]])
    draw.close(rotary(jnp.asarray(x), jnp.asarray(at), base=base), oracle.rotary(x, at, base), FLOAT32)
    row = rotary(jnp.asarray(x), jnp.asarray(at[:1]), base=base)
    np.testing.assert_array_equal(row, rotary(jnp.asarray(x), jnp.asarray(at[[0, 0]]), base=base))


def test_rotary_turns_the_two_halves_and_not_neighbours():
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0])[None, None, None]
    turned = rotary(x, jnp.asarray([[1]]), base=10000.0)
    draw.close(turned[0, 0, 0], [-1.9841106, 1.9599007, 2.4623779, 4.0197997], FLOAT32)


@pytest.mark.parametrize("position", [257, 4095])
@pytest.mark.parametrize("position_dtype", ["int32", "int16"])
def test_rotary_is_exact_far_from_the_origin(position, position_dtype):
    """An angle from rounded frequencies, or from position 256 or 4096 instead, is wrong in the first digit."""
    at = jnp.asarray([[position]], position_dtype)
    expected = oracle.rotary(unit_pairs(128), np.array([[position]]), 10000.0)
    draw.close(rotary(unit_pairs(128), at, base=10000.0), expected, FAR)
    turned = rotary(unit_pairs(128, "bfloat16"), at, base=10000.0)
    assert turned.dtype == "bfloat16"
    draw.close(turned, expected, HALF_ULP)
    # Only the final value is rounded: the same as rounding what float32 gives.
    np.testing.assert_array_equal(turned, rotary(unit_pairs(128), at, base=10000.0).astype(jnp.bfloat16))


def test_rotary_at_the_marker_lane():
    turned = rotary(unit_pairs(128, "bfloat16"), jnp.asarray([[4095]]), base=10000.0)[0, 0, 0]
    draw.close(turned[jnp.asarray([1, 65])], [-0.742366, 0.669995], HALF_ULP)


@given(st.integers(0, 4000), st.integers(0, 60), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_rotary_scores_depend_on_the_distance_only(start, distance, seed):
    q, k = np.random.default_rng(seed).normal(size=(2, 1, 1, 1, 64)).astype(np.float32) / 8

    def score(at, to):
        turned = (rotary(jnp.asarray(x), jnp.asarray([[p]]), base=10000.0) for x, p in ((q, at), (k, to)))
        return float(jnp.vdot(*turned))

    assert abs(score(start + distance, start) - score(distance, 0)) < FAR
    assert abs(score(start, start) - np.vdot(q, k)) < FLOAT32


def test_rotary_keeps_the_length_of_every_pair(rng):
    x = jnp.asarray(rng.normal(size=(1, 9, 2, 8)), jnp.float32)
    turned = rotary(x, 100 * jnp.arange(9)[None], base=50.0)
    first, second = jnp.split(jnp.square(turned), 2, axis=-1)
    before, after = jnp.split(jnp.square(x), 2, axis=-1)
    draw.close(first + second, before + after, FLOAT32)


@pytest.mark.parametrize("width", [2, 16, 128])
@pytest.mark.parametrize("scheme", ADD)
def test_sinusoids_are_the_oracles(scheme, width):
    at = np.array([[0, 1, 2, 63], [-1, -1, 0, 1]])
    made = ADD[scheme](jnp.asarray(at), width)
    assert made.dtype == "float32"
    draw.close(made, getattr(oracle, scheme)(at, width), FLOAT32)
    far = np.array([[257, 4095]])
    draw.close(ADD[scheme](jnp.asarray(far), width), getattr(oracle, scheme)(far, width), FAR)


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match="but 5 lanes are to turn; make it even"):
        rotary(jnp.ones((1, 1, 1, 5)), jnp.zeros((1, 1), int), base=100.0)
    with pytest.raises(ValueError, match="the width is 7; make it even"):
        sinusoidal(jnp.zeros((1, 1), int), 7)


@pytest.mark.parametrize("scheme", ["learned", "sinusoidal", "rotary"])
def test_a_bfloat16_model_tells_position_257_from_256(scheme):
    """In bfloat16 257 is 256 and 4095 is 4096; a model that cast its positions would be off by a whole step."""
    made, params = draw.model(positions=scheme, max_len=4100, dtype="bfloat16", param_dtype="bfloat16", num_layers=1)
    ids, at = draw.ids(1, 4), np.array([[3, 255, 257, 4095]])
    expected = oracle.decoder(params, made.config.to_dict(), ids, at)
    rounded = np.array([[3, 255, 256, 4096]])
    other = oracle.decoder(params, made.config.to_dict(), ids, rounded)
    scale = abs(expected).max()
    draw.close(draw.logits(made, params, ids, jnp.asarray(at)) / scale, expected / scale, BFLOAT16)
    assert (abs(other - expected).max(axis=-1) / scale)[0, 2:].min() > 3 * BFLOAT16


def test_only_differences_of_rotary_positions_matter_to_a_model():
    made, params = draw.model(positions="rotary")
    ids, at = draw.ids(2, 6), jnp.arange(6)[None]
    draw.close(draw.logits(made, params, ids, at + 1000), draw.logits(made, params, ids, at), FAR)
    doubled = draw.logits(made, params, ids, 2 * at)
    assert abs(doubled - draw.logits(made, params, ids, at)).max() > 100 * FAR


def test_rotary_base_and_head_width_come_from_the_config():
    made, params = draw.model(positions="rotary", rotary=jf.Rotary(base=100.0))
    other = jf.build(dataclasses.replace(made.config, rotary=jf.Rotary(base=200.0)))
    ids = draw.ids(1, 6)
    for model in (made, other):
        draw.close(draw.logits(model, params, ids), oracle.decoder(params, model.config.to_dict(), ids), FLOAT32)
    assert abs(draw.logits(made, params, ids) - draw.logits(other, params, ids)).max() > 100 * FLOAT32


def test_gradients_of_rotary_are_the_inverse_turn(rng):
    x, y = (jnp.asarray(rng.normal(size=(1, 3, 1, 4)), jnp.float32) for _ in range(2))
    at = jnp.asarray([[1, 7, 30]])
    gradient = jax.grad(lambda x: (rotary(x, at, base=100.0) * y).sum())(x)
    draw.close(gradient, oracle.rotary(y, -np.asarray(at), 100.0), FLOAT32)


# Longer contexts ------------------------------------------------------------------------------------------------------

SCALINGS = {
    "none": {},
    "linear": {"factor": 8.0},
    "ntk": {"factor": 4.0},
    "by_parts": {"factor": 8.0, "original_len": 8192, "slow": 1.0, "fast": 4.0, "base": 500000.0},
    "yarn": {"factor": 16.0, "original_len": 4096},
    "yarn, fixed magnitude": {"scaling": "yarn", "factor": 40.0, "original_len": 4096, "magnitude": 0.9, "fast": 64.0},
}


@pytest.mark.parametrize("width", [2, 8, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_the_oracles(name, width, rng):
    made = jf.Rotary(**{"scaling": name} | SCALINGS[name])
    found = frequencies(made, width)
    radians, magnitude = oracle.rotary_frequencies(dataclasses.asdict(made), width)
    np.testing.assert_allclose(found.radians, radians, rtol=1e-6)
    assert found.radians.dtype == np.float32
    assert found.magnitude == pytest.approx(magnitude, rel=1e-6)
    x, at = rng.normal(size=(2, 3, 2, width)).astype(np.float32), np.array([[0, 1, -1], [-1, 200, 5]])
    turned = positions.rotary(jnp.asarray(x), jnp.asarray(at), found)
    draw.close(turned, oracle.rotary(x, at, frequencies=radians, magnitude=magnitude), FAR)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "none"])
def test_scalings_slow_the_slowest_lane_by_the_factor_and_the_fastest_not(name):
    made = jf.Rotary(**{"scaling": name} | SCALINGS[name])
    plain = frequencies(jf.Rotary(base=made.base), 128).radians
    share = frequencies(made, 128).radians / plain
    assert share[-1] == pytest.approx(1 / made.factor, rel=1e-5)
    assert share[0] == pytest.approx(1 / made.factor if name == "linear" else 1, rel=1e-5)
    assert (np.diff(share) <= 1e-6).all()


def test_published_values_of_yarn_and_of_by_parts():
    # Head of 64 lanes, base 500000, stretched 8 times from 8192 tokens: lane pair 14 is the first that is slowed.
    share = (
        frequencies(jf.Rotary(**SCALINGS["by_parts"] | {"scaling": "by_parts"}), 64).radians
        / frequencies(jf.Rotary(base=500000.0), 64).radians
    )
    turns = 8192 * 500000.0 ** (-np.arange(0, 64, 2) / 64) / (2 * np.pi)
    np.testing.assert_allclose(share[turns > 4], 1, rtol=1e-6)
    np.testing.assert_allclose(share[turns < 1], 1 / 8, rtol=1e-6)
    assert frequencies(jf.Rotary(scaling="yarn", factor=16.0, original_len=4096), 64).magnitude == pytest.approx(
        1.2772589  # 0.1 ln 16 + 1
    )


@pytest.mark.parametrize("width", [2, 6])
def test_lanes_beyond_the_width_stay_as_they_are(width, rng):
    x, at = rng.normal(size=(1, 4, 2, 8)).astype(np.float32), np.array([[0, 3, 7, 1]])
    turned = rotary(jnp.asarray(x), jnp.asarray(at), base=100.0, width=width)
    np.testing.assert_array_equal(turned[..., width:], x[..., width:])
    draw.close(turned[..., :width], oracle.rotary(x[..., :width], at, 100.0), FLOAT32)
    with pytest.raises(ValueError, match=r"rotary.width=10 lanes are to turn, but the head has 8"):
        frequencies(jf.Rotary(width=10), 8)
