"""Closed forms that pin the oracle: every expected number here is a hand computation or a published constant.

The trick of the attention cases: with q = k = 0 each visible key weighs the same, so that z is the mean of v over the
visible keys, and v_j = j tells which ones they were.
"""

import ast
import math
from pathlib import Path

import numpy as np
import oracle
import pytest

TOLERANCE = 1e-12
PRINTED = 1e-7  # for constants written with seven decimals


def zeros(*shape):
    return np.zeros(shape)


def close(actual, expected, atol=TOLERANCE):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def approx(expected, atol=TOLERANCE):
    return pytest.approx(expected, rel=0, abs=atol)


def mean_of_visible(values, ok):
    """Attention of one head with q = k = 0: for each query, the mean of `values` over its allowed keys."""
    v = np.asarray(values, dtype=float).reshape(1, -1, 1, 1)
    z = oracle.attention(zeros(1, ok.shape[2], 1, 2), zeros(1, ok.shape[3], 1, 2), v, ok, scale=1.0)
    return z[0, :, 0, 0]


def test_the_oracle_imports_no_code_that_it_judges():
    imported = set()
    for node in ast.walk(ast.parse(Path(oracle.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported <= {"numpy", "math", "typing"}


# Attention and masks --------------------------------------------------------------------------------------------------


def test_softmax():
    close(oracle.softmax(np.log([1.0, 2.0, 5.0])), [0.125, 0.25, 0.625])
    close(oracle.softmax([1000.0, 1000.0, -np.inf]), [0.5, 0.5, 0.0], atol=0)


def test_attention_weighs_values_by_the_softmax_of_scaled_scores():
    q, k = np.array([[[[2.0, 0.0]]]]), np.array([[[[math.log(3.0), 7.0]], [[0.0, -7.0]]]])
    v, ok = np.array([[[[8.0]], [[4.0]]]]), np.ones((1, 1, 1, 2), bool)
    z, pattern = oracle.attention(q, k, v, ok, scale=0.5, with_pattern=True)
    close(pattern[0, 0, 0], [0.75, 0.25])
    close(z[0, 0, 0], [7.0])


def test_softcap_bounds_the_scores_before_the_bias():
    q, k, ok = np.full((1, 1, 1, 1), 1e6), np.array([1.0, -1.0]).reshape(1, 2, 1, 1), np.ones((1, 1, 1, 2), bool)
    bias = np.array([0.0, 4.0]).reshape(1, 1, 1, 2)  # capped scores are +2 and -2, so the bias makes them equal
    _, pattern = oracle.attention(q, k, k, ok, bias, scale=1.0, softcap=2.0, with_pattern=True)
    close(pattern[0, 0, 0], [0.5, 0.5])
    q = np.full((1, 1, 1, 1), 3.0)
    _, pattern = oracle.attention(q, k, k, ok, scale=1.0, softcap=2.0, with_pattern=True)
    difference = 2 * 2.0 * math.tanh(3.0 / 2.0)
    close(np.log(pattern[0, 0, 0, 0] / pattern[0, 0, 0, 1]), difference)


def test_a_row_that_allows_nothing_is_zero():
    ok = np.array([[True, True], [False, False]]).reshape(1, 1, 2, 2)
    v = np.array([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 2, 1, 2)
    z, pattern = oracle.attention(zeros(1, 2, 1, 2), zeros(1, 2, 1, 2), v, ok, scale=1.0, with_pattern=True)
    np.testing.assert_array_equal(z[0, :, 0], [[2.0, 3.0], [0.0, 0.0]])
    np.testing.assert_array_equal(pattern[0, 0], [[0.5, 0.5], [0.0, 0.0]])


def test_linear_attention_weighs_by_products_of_features():
    q, k = np.array([0.0, -1.0]).reshape(1, 2, 1, 1), np.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    v, causal = np.array([3.0, 6.0]).reshape(1, 2, 1, 1), np.tril(np.ones((1, 1, 2, 2), bool))
    z = oracle.linear_attention(q, k, v, causal, scale=2.0)  # features of k: 1 and 2; the query's is a common factor
    close(z[0, :, 0, 0], [3.0, (1 * 3 + 2 * 6) / 3])
    two_lanes = oracle.linear_attention(
        np.array([0.0, math.log(0.5)]).reshape(1, 1, 1, 2),
        np.array([[0.0, 1.0], [2.0, 0.0]]).reshape(1, 2, 1, 2),
        np.array([[1.0, 0.0], [0.0, 1.0]]).reshape(1, 2, 1, 2),
        np.ones((1, 1, 1, 2), bool),
        scale=2.0,
    )  # features of q: 1 and 1/4; of the keys: (1, 2) and (3, 1); weights 1.5 and 3.25
    close(two_lanes[0, 0, 0], [1.5 / 4.75, 3.25 / 4.75])
    assert not oracle.linear_attention(q, k, v, np.zeros((1, 1, 2, 2), bool), scale=1.0).any()


@pytest.mark.parametrize(("N", "K"), [(4, 2), (6, 2), (8, 1), (3, 3)])
def test_query_heads_share_key_value_heads_in_consecutive_groups(N, K):
    v = np.broadcast_to(10.0 * np.arange(1, K + 1)[None, None, :, None], (1, 3, K, 1))
    z = oracle.attention(zeros(1, 3, N, 2), zeros(1, 3, K, 2), v, np.ones((1, 1, 3, 3), bool), scale=1.0)
    np.testing.assert_array_equal(z[0, 0, :, 0], np.repeat(10.0 * np.arange(1, K + 1), N // K))


def test_masks_and_biases_may_differ_by_head():
    ok = np.array([[True, True], [True, False]]).reshape(1, 2, 1, 2)
    bias = np.array([[0.0, math.log(3.0)], [5.0, 5.0]]).reshape(1, 2, 1, 2)
    v = np.array([4.0, 8.0]).reshape(1, 2, 1, 1)
    z = oracle.attention(zeros(1, 1, 2, 2), zeros(1, 2, 1, 2), v, ok, bias, scale=1.0)
    close(z[0, 0, :, 0], [7.0, 4.0])


def test_linear_distance_bias():
    slopes = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    bias = slopes[None, :, None, None] * np.array([-3.0, -2.0, -1.0, 0.0])
    v = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1, 1)
    z = oracle.attention(zeros(1, 1, 4, 2), zeros(1, 4, 1, 2), v, np.ones((1, 1, 1, 4), bool), bias, scale=1.0)
    close(z[0, 0, :, 0], [2.8070952, 2.5780387, 2.5195299, 2.5048828], atol=PRINTED)


def test_causal_is_said_by_positions_whatever_the_shape():
    square = oracle.allowed(np.arange(5)[None], np.arange(5)[None], causal=True)
    np.testing.assert_array_equal(square[0, 0], np.tril(np.ones((5, 5), bool)))
    cache = np.full((1, 8), -1)
    for t, expected in enumerate([1.0, 1.5, 2.0, 2.5]):  # one query against a cache of eight slots, filled one by one
        cache[0, t] = t
        ok = oracle.allowed(np.array([[t]]), cache, causal=True)
        close(mean_of_visible(np.arange(1, 9), ok), [expected])


def test_no_token_is_never_a_key():
    positions = np.array([[-1, -1, 0, 1], [0, 1, -1, -1]])
    ok = oracle.allowed(positions, positions)
    assert ok.shape == (2, 1, 4, 4)
    np.testing.assert_array_equal(ok.any(axis=(1, 2)), positions >= 0)
    causal = oracle.allowed(positions, positions, causal=True)
    np.testing.assert_array_equal(causal.any(axis=(1, 3)), positions >= 0)


def test_a_window_counts_the_token_itself():
    positions = np.arange(10)[None]
    ok = oracle.allowed(positions, positions, causal=True, window=4)
    close(mean_of_visible(np.arange(10), ok), [0.0, 0.5, 1.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5])
    both_sides = oracle.allowed(positions, positions, window=2)
    close(mean_of_visible(np.arange(10), both_sides), [0.5, *range(1, 9), 8.5])


def test_packed_documents_do_not_see_each_other():
    segments = np.array([[1, 1, 1, 2, 2]])
    positions = oracle.positions_from_segments(segments)
    ok = oracle.allowed(positions, positions, segments, segments, causal=True)
    close(mean_of_visible(np.arange(5), ok), [0.0, 0.5, 1.0, 3.0, 3.5])


def test_positions_restart_in_each_segment():
    segments = np.array([[1, 1, 1, 2, 2, 0], [0, 0, 3, 3, 0, 3], [0, 0, 0, 0, 0, 0]])
    expected = [[0, 1, 2, 0, 1, -1], [-1, -1, 0, 1, -1, 0], [-1, -1, -1, -1, -1, -1]]
    np.testing.assert_array_equal(oracle.positions_from_segments(segments), expected)


# Positions ------------------------------------------------------------------------------------------------------------


def test_sinusoidal_interleaves_sines_and_cosines():
    out = oracle.sinusoidal(np.array([[0, 3]]), 4)
    expected = [[0.0, 1.0, 0.0, 1.0], [math.sin(3.0), math.cos(3.0), math.sin(0.03), math.cos(0.03)]]
    close(out[0], expected)


def test_sinusoidal_halves_have_the_sines_first():
    out = oracle.sinusoidal_halves(np.array([[0, 3]]), 4)
    expected = [[0.0, 0.0, 1.0, 1.0], [math.sin(3.0), math.sin(0.03), math.cos(3.0), math.cos(0.03)]]
    close(out[0], expected)


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [
        (False, [-1.9841106, 1.9599007, 2.4623779, 4.0197997]),
        (True, [-1.1426397, 1.9220756, 2.9598507, 4.0297995]),
    ],
)
def test_rotary_turns_the_right_pairs(interleaved, expected):
    x = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    out = oracle.rotary(x, np.array([[1]]), 10000.0, interleaved=interleaved)
    close(out[0, 0, 0], expected, atol=PRINTED)


def test_rotary_far_from_the_origin():
    x = np.zeros((1, 1, 1, 128))
    x[..., 1] = 1.0  # pairs with lane 65
    out = oracle.rotary(x, np.array([[4095]]), 10000.0)[0, 0, 0]
    close(out[[1, 65]], [-0.742366, 0.669995], atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_the_distance_only(interleaved):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 8))

    def score(at, to):
        turned = [oracle.rotary(x, np.array([[p]]), 100.0, interleaved=interleaved) for x, p in ((q, at), (k, to))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 4) == approx(score(103, 100))
    assert score(5, 5) == approx(float((q * k).sum()))
    assert abs(score(7, 4) - score(4, 7)) > 1e-3  # it knows the direction


# Layers ---------------------------------------------------------------------------------------------------------------


def test_layernorm():
    x = np.array([1.0, 3.0, 5.0, 7.0])  # mean 4, variance 5
    close(
        oracle.layernorm(x, np.array([1.0, 1.0, 2.0, 2.0]), np.array([0.0, 1.0, 0.0, 1.0]), 4.0),
        [-1.0, 2 / 3, 2 / 3, 3.0],
    )
    close(oracle.layernorm(x, np.ones(4), None, 4.0), [-1, -1 / 3, 1 / 3, 1])


def test_rmsnorm():
    x = np.array([1.0, 1.0, 5.0, 3.0])  # mean square 9
    close(oracle.rmsnorm(x, np.array([1.0, 2.0, 1.0, 1.0]), 16.0), [0.2, 0.4, 1.0, 0.6])


@pytest.mark.parametrize(
    ("name", "at_one"),
    [("relu", 1.0), ("gelu", 0.8413447460685429), ("gelu_tanh", 0.8411919906082768), ("silu", 0.7310585786300049)],
)
def test_activations(name, at_one):
    f = oracle.ACTIVATIONS[name]
    close(f(np.array([1.0, -1.0])), [at_one, at_one - 1.0])
    close(f(np.array([0.0, 1e4, -1e4])), [0.0, 1e4, 0.0])


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_of_attention_are_its_differences(softcap):
    rng = np.random.default_rng(0)
    given = [rng.normal(size=shape) for shape in ((2, 3, 4, 2), (2, 5, 2, 2), (2, 5, 2, 2), (2, 4, 3, 5))]
    ok, dz = rng.uniform(size=(2, 1, 3, 5)) < 0.7, rng.normal(size=(2, 3, 4, 2))
    ok[0, 0, 1] = False  # a query that sees nothing

    def value(q, k, v, bias):
        return (oracle.attention(q, k, v, ok, bias, scale=0.7, softcap=softcap) * dz).sum()

    gradients = oracle.attention_gradients(*given[:3], ok, given[3], dz, scale=0.7, softcap=softcap)
    for number, gradient in enumerate(gradients):
        for at in np.ndindex(gradient.shape):
            step = np.zeros(gradient.shape)
            step[at] = 1e-5
            up, down = (value(*given[:number], given[number] + s, *given[number + 1 :]) for s in (step, -step))
            assert gradient[at] == approx((up - down) / 2e-5, 1e-8)


def test_mlp_plain_and_gated():
    x = np.array([[[2.0]]])
    p = {
        "up_proj": {"kernel": np.array([[1.0, -1.0]]), "bias": np.array([1.0, 1.0])},  # [3, -1]
        "down_proj": {"kernel": np.array([[10.0], [100.0]]), "bias": np.array([5.0])},
    }
    assert oracle.mlp(x, p, "relu").item() == 35.0  # relu [3, 0]
    p["gate_proj"] = {"kernel": np.array([[-1.0, 2.0]])}  # [-2, 4]: relu takes the gate, not the up projection
    assert oracle.mlp(x, p, "relu").item() == 5.0 + 100.0 * 4.0 * -1.0


# Whole models ---------------------------------------------------------------------------------------------------------

CONFIG = {
    "vocab_size": 11, "max_len": 16, "d_model": 8, "num_layers": 2, "num_distinct_layers": None,
    "num_heads": 4, "num_kv_heads": 2, "d_head": 4, "d_ff": 12,
    "residual": "pre", "norm": "layernorm", "norm_eps": 1e-5, "positions": "rotary",
    "rotary": {"base": 100.0, "width": None, "scaling": "none", "factor": 1.0, "magnitude": None},
    "qk_norm": False, "softcap": None, "window": None, "embed_norm": False, "logit_scale": None, "head_bias": False,
    "logit_softcap": None, "final_norm": None,
    "activation": "gelu", "gated": False, "bias": True, "attention_scale": None, "embed_scale": False,
    "tie_embeddings": True,
}  # fmt: skip
VARIANTS = {
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal", "embed_scale": True, "residual": "post", "activation": "relu"},
    "rotary": {"norm": "rmsnorm", "gated": True, "bias": False, "activation": "silu", "tie_embeddings": False},
    "none": {"positions": "none", "attention_scale": 1.0},
}


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    V, P, D, F = (config[name] for name in ("vocab_size", "max_len", "d_model", "d_ff"))
    N, K, H = (config[name] for name in ("num_heads", "num_kv_heads", "d_head"))

    def proj(*shape, out):
        kernel = {"kernel": rng.normal(size=shape) * 0.4}
        return kernel | ({"bias": rng.normal(size=out) * 0.4} if config["bias"] else {})

    def norm():
        bias = {"bias": rng.normal(size=D)} if config["bias"] and config["norm"] == "layernorm" else {}
        return {"scale": 1 + 0.3 * rng.normal(size=D)} | bias

    def layer():
        attn = {"q_proj": proj(D, N, H, out=(N, H)), "o_proj": proj(N, H, D, out=D)}
        attn |= {name: proj(D, K, H, out=(K, H)) for name in ("k_proj", "v_proj")}
        ups = ("up_proj", "gate_proj") if config["gated"] else ("up_proj",)
        mlp = {name: proj(D, F, out=F) for name in ups} | {"down_proj": proj(F, D, out=D)}
        return {"attn": attn, "mlp": mlp, "attn_norm": norm(), "mlp_norm": norm()}

    params = {"embed": {"token": {"embedding": rng.normal(size=(V, D))}}}
    params["decoder"] = {f"layers_{i}": layer() for i in range(config["num_layers"])}
    if config["residual"] == "pre":
        params["decoder"]["final_norm"] = norm()
    if config["positions"] == "learned":
        params["embed"]["position"] = {"embedding": rng.normal(size=(P, D))}
    if not config["tie_embeddings"]:
        params["lm_head"] = {"kernel": rng.normal(size=(D, V))}
    return params


@pytest.fixture(params=VARIANTS)
def model(request):
    config = CONFIG | VARIANTS[request.param]
    return random_params(config), config


IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def test_padding_changes_nothing(model):
    params, config = model
    expected = oracle.decoder(params, config, IDS)
    for left in (0, 2, 3):
        positions = np.tile([-1] * left + list(range(5)) + [-1] * (3 - left), (2, 1))
        for pad_id in (0, 9):
            ids = np.full((2, 8), pad_id)
            ids[:, left : left + 5] = IDS
            logits = oracle.decoder(params, config, ids, positions)
            assert np.isfinite(logits).all()
            close(logits[:, left : left + 5], expected)


def test_packed_documents_equal_separate_ones(model):
    params, config = model
    packed = oracle.decoder(
        params, config, np.array([[*IDS[0], *IDS[1, :3], 0]]), segments=np.array([[1] * 5 + [2] * 3 + [0]])
    )
    close(packed[0, :5], oracle.decoder(params, config, IDS)[0])
    close(packed[0, 5:8], oracle.decoder(params, config, IDS[1:, :3])[0])


def test_no_token_sees_a_later_one_and_every_token_sees_the_first(model):
    params, config = model
    logits = oracle.decoder(params, config, IDS)
    last, first = IDS.copy(), IDS.copy()
    last[:, -1], first[:, 0] = 7, 7
    np.testing.assert_array_equal(oracle.decoder(params, config, last)[:, :-1], logits[:, :-1])
    assert (abs(oracle.decoder(params, config, first) - logits).max(-1) > 1e-6).all()


def test_only_positions_know_the_order(model):
    params, config = model
    swapped = abs(oracle.decoder(params, config, IDS[:, [1, 0, 2]]) - oracle.decoder(params, config, IDS[:, :3]))
    assert (swapped[:, 0] > 1e-6).any()
    one_layer = config | {"num_layers": 1}  # deeper causal models know the order from what each token could see
    swapped = oracle.decoder(params, one_layer, IDS[:, [1, 0, 2]]) - oracle.decoder(params, one_layer, IDS[:, :3])
    assert (abs(swapped[:, 2]).max() < 1e-9) == (config["positions"] == "none")


def test_attention_scale_multiplies_the_queries():
    config = CONFIG | {"num_layers": 1}
    params = random_params(config)
    default = oracle.decoder(params, config, IDS)
    close(oracle.decoder(params, config | {"attention_scale": 0.5}, IDS), default)  # d_head is 4
    tripled = oracle.decoder(params, config | {"attention_scale": 1.5}, IDS)
    q_proj = params["decoder"]["layers_0"]["attn"]["q_proj"]
    q_proj["kernel"], q_proj["bias"] = 3 * q_proj["kernel"], 3 * q_proj["bias"]
    close(oracle.decoder(params, config, IDS), tripled)
    assert abs(tripled - default).max() > 1e-3


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_one_layer_by_hand(residual):
    """Queries and keys 0, values and outputs the identity, no feed-forward: x plus the mean of what is visible."""
    config = CONFIG | {
        "residual": residual, "norm": "rmsnorm", "norm_eps": 0.5, "positions": "none", "num_layers": 1,
        "num_distinct_layers": None, "num_heads": 1, "bias": False, "embed_scale": True, "vocab_size": 3, "d_model": 4,
    }  # fmt: skip
    eye, E = np.eye(4), np.array([[1.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 3.0, 0]])
    attn = {name: {"kernel": zeros(4, 1, 4)} for name in ("q_proj", "k_proj")}
    attn |= {"v_proj": {"kernel": eye[:, None]}, "o_proj": {"kernel": eye[None]}}
    mlp = {"up_proj": {"kernel": zeros(4, 6)}, "down_proj": {"kernel": zeros(6, 4)}}
    one, two, ten = ({"scale": np.full(4, c)} for c in (1.0, 2.0, 10.0))
    layer = {"attn": attn, "mlp": mlp, "attn_norm": two, "mlp_norm": one}
    params = {"embed": {"token": {"embedding": E}}, "decoder": {"layers_0": layer, "final_norm": ten}}
    logits, streams = oracle.decoder(params, config, np.array([[0, 1, 2]]), with_streams=True)

    def rms(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5)

    def running_mean(x):
        return np.cumsum(x, 0) / np.array([[1], [2], [3]])

    x = 2.0 * E  # embed_scale: sqrt(4)
    if residual == "pre":
        expected = x + running_mean(2 * rms(x))
        hidden = 10 * rms(expected)
    else:
        hidden = expected = rms(2 * rms(x + running_mean(x)))
    close(streams[:, 0], [x, expected])
    close(logits[0], hidden @ E.T)


def test_greedy_follows_the_most_likely_token():
    """With all layers silent and a one-hot embedding the head is a table of successors: here, the next id."""
    V = 8
    config = CONFIG | {"vocab_size": V, "d_model": V, "num_layers": 0, "tie_embeddings": False}
    params = {
        "embed": {"token": {"embedding": np.eye(V)}},
        "decoder": {"final_norm": {"scale": np.ones(V)}},
        "lm_head": {"kernel": np.roll(np.eye(V), 1, axis=1)},
    }
    new = oracle.greedy(params, config, np.array([[0, 3], [4, 6]]), 4)
    np.testing.assert_array_equal(new, [[4, 5, 6, 7], [7, 0, 1, 2]])
    assert oracle.greedy(params, config, np.array([[0, 3]]), 0).shape == (1, 0)


# Loss -----------------------------------------------------------------------------------------------------------------

LOGITS = np.array([[[2.0, 0.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0]]])


@pytest.mark.parametrize("ignored_label", [-100, -1, 2, 99])
def test_smoothing_ignores_tokens_without_weight(ignored_label):
    labels, weights = np.array([[0, ignored_label]]), np.array([[1.0, 0.0]])
    assert oracle.cross_entropy(LOGITS, labels, weights) == approx(0.3407530, PRINTED)
    assert oracle.cross_entropy(LOGITS, labels, weights, 0.1) == approx(0.4907530, PRINTED)
    assert oracle.cross_entropy(LOGITS, labels, weights, 1.0) == approx(1.8407530, PRINTED)
    assert oracle.cross_entropy(LOGITS, labels, 0 * weights, 0.1, 1e-4) == 0.0


def test_the_loss_is_a_weighted_mean_over_all_tokens():
    logits = np.log(np.array([[[0.25, 0.75], [0.5, 0.5]], [[0.125, 0.875], [0.9, 0.1]]]))
    labels, weights = np.array([[0, 1], [0, 0]]), np.array([[1.0, 2.0], [1.0, 0.0]])
    assert oracle.cross_entropy(logits, labels, weights) == approx(7 * math.log(2) / 4)


def test_z_loss_squares_the_log_normaliser():
    logits, one = np.full((1, 1, 4), 3.0), np.ones((1, 1))
    log_z = 3.0 + math.log(4.0)
    loss = oracle.cross_entropy(logits, np.zeros((1, 1), int), one, z_loss=0.01)
    assert loss == approx(math.log(4.0) + 0.01 * log_z**2)


# Sampling -------------------------------------------------------------------------------------------------------------


def test_temperature_divides_and_zero_is_greedy():
    logits = np.array([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    np.testing.assert_array_equal(oracle.softmax(oracle.temperature(logits, 0)), [[0, 1, 0], [0, 1, 0]])
    close(oracle.temperature(logits, 2.0), logits / 2, atol=0)
    per_row = oracle.temperature(logits, [0.0, 1.0])
    np.testing.assert_array_equal(per_row, [[-np.inf, 3.0, -np.inf], [1.0, 3.0, 2.0]])
    np.testing.assert_array_equal(oracle.softmax(oracle.temperature(np.array([1.0, 5.0, 5.0]), 0.0)), [0, 1, 0])


def test_top_k_keeps_exactly_k():
    logits = np.array([1.0, 3.0, 2.0, 3.0, 3.0])
    kept = [np.flatnonzero(np.isfinite(oracle.top_k(logits, k))).tolist() for k in (1, 2, 3, 4, 5, 99)]
    assert kept == [[1], [1, 3], [1, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = np.log([0.25, 0.5, 0.125, 0.125])
    kept = [np.flatnonzero(np.isfinite(oracle.top_p(logits, p))).tolist() for p in (0, 0.4, 0.6, 0.8, 0.9, 1)]
    assert kept == [[1], [1], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    close(oracle.softmax(oracle.top_p(logits, 0.6)), [1 / 3, 2 / 3, 0, 0])
    assert np.flatnonzero(np.isfinite(oracle.top_p(zeros(4), 0.5))).tolist() == [0, 1]  # reaching p is enough
    tiny = np.array([0.0, -90.0])  # p = 1 keeps what rounding would lose: the mass of the first is 1.0 already
    assert np.isfinite(oracle.top_p(tiny, 1.0)).all()


def test_transforms_compose():
    logits = np.array([[1.0, 3.0, 2.0]])
    for t, k, p in ((0, 3, 1.0), (1.0, 1, 1.0), (1.0, 3, 0.0), (0, 1, 0.0)):
        out = oracle.top_p(oracle.top_k(oracle.temperature(logits, t), k), p)
        np.testing.assert_array_equal(oracle.softmax(out), [[0.0, 1.0, 0.0]])
    out = oracle.top_p(oracle.top_k(np.log([[0.1, 0.3, 0.2, 0.4]]), 2), 0.5)  # the mass is counted after top_k: 4/7
    np.testing.assert_array_equal(np.isfinite(out), [[False, False, False, True]])


# Optimisation ---------------------------------------------------------------------------------------------------------


def test_the_first_adamw_step_is_the_learning_rate_times_the_sign():
    x, grad = np.array([1.0, 1.0, 1.0]), np.array([1e-3, -20.0, 0.0])
    new, m, v = oracle.adamw(x, grad, zeros(3), zeros(3), 1, lr=0.1, eps=1e-30)
    close(new, [0.9, 1.1, 1.0])
    close(m, 0.1 * grad)
    close(v, 0.001 * grad**2)


def test_adamw_second_step_by_hand():
    x, m, v = oracle.adamw(np.array([0.0]), np.array([4.0]), zeros(1), zeros(1), 1, lr=1.0, b1=0.5, b2=0.5, eps=4.0)
    close([x, m, v], [[-0.5], [2.0], [8.0]])  # 4 / (4 + 4)
    x, m, v = oracle.adamw(x, np.array([4.0]), m, v, 2, lr=1.0, b1=0.5, b2=0.5, eps=4.0)
    close([x, m, v], [[-1.0], [3.0], [12.0]])  # the same step again: the bias corrections are 3/4 now
    x, m, v = oracle.adamw(x, np.array([-3.0]), m, v, 3, lr=1.0, b1=0.5, b2=0.5, eps=4.0)
    close([x, m, v], [[-1.0], [0.0], [10.5]])


def test_adamw_decay_does_not_pass_through_the_moments():
    x, m, v = oracle.adamw(np.ones(2), zeros(2), zeros(2), zeros(2), 1, lr=1.0, weight_decay=0.1)
    close([x, m, v], [[0.9, 0.9], [0.0, 0.0], [0.0, 0.0]])
    x, _, _ = oracle.adamw(np.ones(1), zeros(1), zeros(1), zeros(1), 1, lr=0.5, weight_decay=0.1)
    close(x, [0.95])


def test_schedule_corners():
    def lr(step):
        return oracle.warmup_cosine(step, peak=2.0, warmup=10, total=110, final_fraction=0.1)

    corners = {0: 0.0, 5: 1.0, 10: 2.0, 60: 1.1, 110: 0.2, 1000: 0.2}
    close([lr(step) for step in corners], list(corners.values()))
    assert lr(35) == approx(0.2 + 1.8 * (1 + math.sqrt(0.5)) / 2)
    assert oracle.warmup_cosine(0, peak=2.0, warmup=0, total=4) == 2.0  # no warm-up: the peak at once


def test_clipping_scales_all_arrays_together():
    tree = {"a": np.array([3.0, 0.0]), "b": {"c": np.array([[4.0]])}}
    assert oracle.global_norm(tree) == approx(5.0)
    clipped = oracle.clip_by_global_norm(tree, 1.0)
    close(clipped["a"], [0.6, 0.0])
    close(clipped["b"]["c"], [[0.8]])
    np.testing.assert_array_equal(oracle.clip_by_global_norm(tree, 5.5)["a"], tree["a"])
    assert oracle.clip_by_global_norm({"a": zeros(2)}, 1.0)["a"].tolist() == [0.0, 0.0]
