import dataclasses
import json
import math
from typing import get_args

import draw
import pytest
from hypothesis import given, settings

import jaxformer as jf
from jaxformer import biases, blocks, config, config_checks, layers, models, positions, rotary

NEEDED = ("vocab_size", "max_len", "d_model", "num_layers", "num_heads")
SIZES = (*NEEDED, "num_kv_heads", "d_head", "d_ff")
# The annotation check of the test suite would refuse most bad values before the config does.
as_a_user = pytest.mark.usefixtures("unchecked")


@given(draw.configs())
@settings(deadline=None)
def test_json_and_back_is_the_same_config(made):
    again = jf.Config.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert hash(again) == hash(made)
    assert dataclasses.asdict(again) == dataclasses.asdict(made)


@given(draw.configs())
@settings(deadline=None)
def test_sizes_fill_in_what_follows_from_others(made):
    size = made.sizes
    assert [size[letter] for letter in "VPDLN"] == [getattr(made, name) for name in NEEDED]
    assert size["K"] == (made.num_heads if made.num_kv_heads is None else made.num_kv_heads)
    assert size["F"] == (4 * made.d_model if made.d_ff is None else made.d_ff)
    assert size["H"] == (made.d_model // made.num_heads if made.d_head is None else made.d_head)
    assert math.isclose(made.scale, size["H"] ** -0.5 if made.attention_scale is None else made.attention_scale)


@pytest.mark.parametrize("name", jf.PRESETS)
def test_presets_are_json_too(name):
    assert jf.Config.from_dict(json.loads(json.dumps(jf.PRESETS[name].to_dict()))) == jf.PRESETS[name]


def test_equal_configs_are_one_key_and_different_ones_are_not():
    assert len({draw.tiny(), draw.tiny(), draw.tiny(num_layers=3)}) == 2


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        draw.tiny().d_model = 8


def test_every_choice_has_a_meaning_and_every_meaning_a_choice():
    tables = {
        config.Architecture: models.ARCHITECTURES,
        config.Residual: blocks.RESIDUAL,
        config.Norm: layers.NORMS,
        config.Activation: layers.ACTIVATIONS,
        config.Positions: positions.ADD | positions.ROTATE | biases.BIAS | dict.fromkeys(("none", "learned")),
        rotary.Scaling: positions.SCALINGS,
    }
    for choices, table in tables.items():
        assert set(get_args(choices)) == set(table)
    assert not set(positions.ADD) & set(positions.ROTATE) | set(positions.ADD | positions.ROTATE) & set(biases.BIAS)


@as_a_user
def test_every_choice_field_is_checked():
    annotations = {field.name: field.type for field in dataclasses.fields(jf.Config)}
    assert {name for name, kind in annotations.items() if get_args(kind) and isinstance(get_args(kind)[0], str)} == set(
        config._CHOICES
    )
    for name in config._CHOICES:
        with pytest.raises(ValueError, match=rf"^{name}='nonsense' is unknown; choose one of \['"):
            draw.tiny(**{name: "nonsense"})


@as_a_user
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
def test_sizes_are_integers_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} must be an integer of at least 1$"):
        draw.tiny(**{name: value})


@as_a_user
@pytest.mark.parametrize("name", NEEDED)
def test_sizes_without_a_default_cannot_be_none(name):
    with pytest.raises(ValueError, match=rf"^{name}=None must be an integer"):
        draw.tiny(**{name: None})


@as_a_user
@pytest.mark.parametrize("name", config_checks._FLAGS)
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_flags_are_booleans(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} must be true or false$"):
        draw.tiny(**{name: value})


@as_a_user
@pytest.mark.parametrize("name", config_checks._OPTIONAL_FLAGS)
def test_optional_flags_may_be_none(name):
    assert getattr(draw.tiny(**{name: None}), name) is None
    with pytest.raises(ValueError, match=rf"^{name}=1 must be true or false$"):
        draw.tiny(**{name: 1})


@as_a_user
@pytest.mark.parametrize("name", ["norm_eps", *config_checks._OPTIONAL_NUMBERS])
@pytest.mark.parametrize("value", [0.0, -1e-5, math.inf, math.nan, "1", True])
def test_factors_are_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} must be a positive finite number$"):
        draw.tiny(**{name: value})


@as_a_user
@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
@pytest.mark.parametrize("value", [-0.1, 1, 1.5, math.nan, None, False])
def test_dropout_is_a_rate_below_one(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} must be a number from 0"):
        draw.tiny(**{name: value})


@as_a_user
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 30}, "d_model=30 is not a multiple of num_heads=4; set d_head explicitly"),
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3; each"),
        ({"num_heads": 2, "num_kv_heads": 4}, "num_heads=2 is not a multiple of num_kv_heads=4; each"),
        ({"d_head": 3}, "but d_head=3 is odd; make it even"),
        ({"d_model": 12}, "but d_head=3 is odd; make it even"),
        ({"positions": "sinusoidal", "d_model": 15, "d_head": 4}, "but d_model=15 is odd; make it even"),
        (
            {"rotary": jf.Rotary(width=6)},
            r"rotary.width=\[6\]: all layers turn the same number of lanes, at most d_head=4",
        ),
        ({"rotary": (jf.Rotary(width=2), jf.Rotary())}, r"rotary.width=\[2, 4\]: all layers"),
        ({"rotary": jf.Rotary(width=3)}, "but rotary.width=3 is odd; make it even"),
        ({"rotary": ()}, r"rotary=\(\) is no pattern"),
        ({"rotary": {"base": 1.0}}, "must be a Rotary"),
        ({"window": ()}, r"window=\(\) is no pattern"),
        ({"window": (3, 0)}, "window=0 must be an integer of at least 1"),
        ({"window": 2.0}, "window=2.0 must be an integer of at least 1"),
        ({"positions": "relative", "relative_buckets": 7}, "relative_buckets=7 must be even and at least 4"),
        ({"positions": "relative", "relative_buckets": 2}, "relative_buckets=2 must be even and at least 4"),
        ({"positions": "relative", "relative_reach": 16}, "relative_reach=16 beyond the half of them"),
        ({"head": "pooler"}, "head='pooler' is for an encoder; a model with a decoder has head='lm'"),
        ({"architecture": "encoder", "head": "classifier"}, "head='classifier' with num_labels=None: only classifiers"),
        ({"num_labels": 3}, "head='lm' with num_labels=3: only classifiers have it, and must"),
        ({"num_decoder_layers": 3}, "num_decoder_layers=3 is for architecture='encoder_decoder'"),
        ({"d_embed": 8}, "d_embed=8: a head tied to narrower embeddings needs head='masked_lm'"),
        ({"attention": None}, "attention=None must be the name of an implementation"),
        ({"num_layers": 1, "window": (4, 0)}, "window=0 must be an integer of at least 1"),
        ({"num_layers": 1, "rotary": (jf.Rotary(), "far")}, "must be a Rotary, or a tuple of them"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers_and_the_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        draw.tiny(**fields)


@as_a_user
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": 0.0}, "rotary.base=0.0 must be a positive finite number"),
        ({"factor": math.inf}, "rotary.factor=inf must be a positive finite number"),
        ({"factor": 2.0}, "rotary.factor=2.0 stretches nothing with scaling='none'; name the scaling"),
        ({"factor": 0.5}, "rotary.factor=0.5 would shorten the context; it must be at least 1"),
        ({"width": 0}, "rotary.width=0 must be an integer of at least 1"),
        ({"scaling": "dynamic"}, r"scaling='dynamic' is unknown; choose one of \['none', 'linear'"),
        ({"scaling": "yarn", "factor": 4.0}, "scaling='yarn' needs original_len"),
        ({"scaling": "by_parts", "original_len": 2.0}, "rotary.original_len=2.0 must be an integer"),
        ({"slow": 4.0, "fast": 4.0}, "rotary.slow=4.0 must be below rotary.fast=4.0"),
    ],
)
def test_rotary_positions_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        jf.Rotary(**fields)


@as_a_user
def test_unknown_fields_of_rotary_positions_are_named():
    with pytest.raises(ValueError, match=r"'rotary' has unknown fields \['theta'\]"):
        jf.Config.from_dict(draw.tiny().to_dict() | {"rotary": {"theta": 1e4}})


def test_patterns_repeat_over_the_layers():
    made = draw.tiny(num_layers=5, window=(3, None), rotary=(jf.Rotary(base=10.0), jf.Rotary(), jf.Rotary(base=20.0)))
    assert made.windows == (3, None, 3, None, 3)
    assert [rotary.base for rotary in made.rotaries] == [10.0, 10000.0, 20.0, 10.0, 10000.0]
    assert draw.tiny(window=4).windows == (4, 4)


def test_odd_widths_are_fine_where_no_lanes_are_paired():
    assert draw.tiny(positions="learned", d_head=3).sizes["H"] == 3
    assert draw.tiny(positions="none", d_model=15, d_head=3).sizes["D"] == 15
    assert draw.tiny(positions="rotary", d_model=15, d_head=4).sizes["D"] == 15


@as_a_user
def test_unknown_and_missing_json_fields_are_named():
    fields = draw.tiny().to_dict()
    with pytest.raises(ValueError, match=r"'num_layer' is unknown; did you mean 'num_layers'\?"):
        jf.Config.from_dict(fields | {"num_layer": 3})
    with pytest.raises(ValueError, match=r"'zzz' is unknown; the fields are \['activation', 'architecture'"):
        jf.Config.from_dict(fields | {"zzz": 3})
    with pytest.raises(ValueError, match=r"lacks \['vocab_size', 'num_layers'\]"):
        jf.Config.from_dict({k: v for k, v in fields.items() if k not in ("vocab_size", "num_layers")})
    with pytest.raises(ValueError, match="d_model='64' must be an integer"):
        jf.Config.from_dict(fields | {"d_model": "64"})
    assert jf.Config.from_dict({name: fields[name] for name in NEEDED}).norm_eps == 1e-5
