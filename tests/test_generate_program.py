"""What decoding refuses, how often it compiles, and what the compiled program costs."""

import functools
import importlib
import re

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxformer as jf
from jaxformer import decoding as program
from jaxformer.decoding import Choice, Prompt
from jaxformer.prompts import make_prompt
from jaxformer.sampling import chain, temperature, top_k, top_p

checks = importlib.import_module("jaxformer.generate")  # jf.generate is the function of this name
KEY = jax.random.key(0)


@functools.cache
def model(**fields):
    return draw.model(**{"max_len": 8} | fields)


@pytest.mark.parametrize("scheme", ["none", "learned", "sinusoidal", "rotary"])
def test_a_text_may_fill_the_context_to_its_last_token_and_no_further(scheme):
    made, params = model(positions=scheme)
    ids = draw.ids(1, 6)
    expected = oracle.greedy(params, made.config.to_dict(), ids, 2)
    np.testing.assert_array_equal(jf.generate(made, params, ids, max_new_tokens=2).ids, expected)
    left_padded = jnp.asarray([[-1, -1, 0, 1, 2, 3]])
    for positions in (None, left_padded):
        with pytest.raises(ValueError, match=r"prompt of 6 and 4 new tokens are 10, over the context of max_len=8"):
            jf.generate(made, params, ids, positions=positions, max_new_tokens=4)


REFUSED = {
    "a context that is too short": (
        {"max_new_tokens": 6},
        ValueError,
        "prompt of 3 and 6 new tokens are 9, .*max_len=8",
    ),
    "no new tokens": ({"max_new_tokens": 0}, ValueError, "max_new_tokens=0 must be an integer of at least 1"),
    "no prompt": (
        {"ids": jnp.zeros((1, 0), int)},
        ValueError,
        r"ids have shape \(1, 0\); they must be \[batch, tokens\]",
    ),
    "no rows": ({"ids": jnp.zeros((0, 3), int)}, ValueError, r"ids have shape \(0, 3\)"),
    "a row without a batch": ({"ids": jnp.arange(3)}, ValueError, r"ids have shape \(3,\)"),
    "float ids": ({"ids": jnp.ones((1, 3))}, ValueError, "ids have type float32; token ids must be integers"),
    "bool ids": ({"ids": jnp.ones((1, 3), bool)}, ValueError, "ids have type bool; token ids must be integers"),
    "an id too large": (
        {"ids": jnp.full((1, 3), 29)},
        ValueError,
        "token id 29 is outside of the vocabulary of 29; ids are 0 to 28",
    ),
    "a negative id": ({"ids": jnp.full((1, 3), -1)}, ValueError, "token id -1 is outside of the vocabulary of 29"),
    "an id of 64 bits": (
        {"ids": np.full((1, 3), 2**32 + 5)},
        ValueError,
        "token id 4294967301 is outside of the vocabulary of 29",
    ),
    "an end that is no token": ({"eos_id": 29}, ValueError, "eos_id=29 is outside of the vocabulary of 29"),
    "one end of several": ({"eos_id": [2, -1]}, ValueError, "eos_id=-1 is outside of the vocabulary of 29"),
    "padding that is no token": ({"pad_id": 30}, ValueError, "pad_id=30 is outside of the vocabulary of 29"),
    "no key": ({"sampler": temperature(1.0)}, ValueError, r"needs a key; pass key=jax\.random\.key\(seed\)"),
    "no key for a function": (
        {"sampler": lambda x: x},
        ValueError,
        r"needs a key; pass key=jax\.random\.key\(seed\)",
    ),
    "a key of the old kind": (
        {"key": jax.random.PRNGKey(0)},
        ValueError,
        r"key is uint32\[2\]; pass one typed key, jax\.random\.key\(seed\)",
    ),
    "a seed for a key": ({"key": 0}, ValueError, r"key is int32\[\]; pass one typed key"),
    "several keys": ({"key": jax.random.split(KEY, 2)}, ValueError, r"key is key<fry>\[2\]; pass one typed key"),
    "positions of another shape": (
        {"positions": jnp.zeros((1, 4), int)},
        ValueError,
        r"positions are int32\[1, 4\]; they must be integers of ids' shape \[1, 3\], with -1",
    ),
    "float positions": (
        {"positions": jnp.zeros((1, 3))},
        ValueError,
        r"positions are float32\[1, 3\]; they must be integers",
    ),
    "positions below -1": (
        {"positions": jnp.asarray([[-2, 0, 1]])},
        ValueError,
        "position -2 is below -1; positions count from 0, and -1 is padding",
    ),
    "positions beyond the table": (
        {"positions": jnp.asarray([[3, 4, 5]]), "max_new_tokens": 3},
        ValueError,
        "position 8 is beyond the learned table of max_len=8",
    ),
    "a stop that is no token": ({"stop": [[1, 29]]}, ValueError, "stop=29 is outside of the vocabulary of 29"),
    "an empty stop": ({"stop": [[1], []]}, ValueError, "holds an empty run, which every text ends with"),
    "a target of a decoder": (
        {"target_ids": jnp.zeros((1, 1), int)},
        ValueError,
        "only an encoder-decoder has a target",
    ),
    "a cache of no kind": (
        {"cache_kind": "sparse"},
        KeyError,
        r"cache kind 'sparse' is unknown; choose one of \['dense'",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("call", [jf.generate, jf.stream])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_the_call_before_anything_is_traced(case, call, monkeypatch):
    change, kind, message = REFUSED[case]
    made, params = model(positions="learned")

    def traced(*_, **__):
        raise AssertionError("the arguments should have been refused before this")

    for name in ("prefill", "run"):
        monkeypatch.setattr(checks, name, traced)
    arguments = {"ids": jnp.zeros((1, 3), int), "max_new_tokens": 1} | change
    with pytest.raises(kind, match=message):
        call(made, params, **arguments)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"loop": "for"}, KeyError, r"loop='for' is unknown; choose one of \['scan', 'while'\]"),
        ({"num_samples": 0}, ValueError, "num_samples=0 must be an integer of at least 1"),
        ({"num_samples": 1.5}, ValueError, "num_samples=1.5 must be an integer"),
    ],
)
def test_ways_to_decode_that_do_not_exist_are_refused(change, kind, message, unchecked):
    made, params = model()
    with pytest.raises(kind, match=message):
        jf.generate(made, params, draw.ids(1, 3), max_new_tokens=2, **change)


def test_new_prompts_keys_and_temperatures_compile_nothing_new():
    made, params = model(max_len=24)
    compiled = (program.run, program.prefill, program.decode)
    for function in compiled:
        function.clear_cache()
    ends = jnp.arange(3)
    for seed, t, p, end in [(0, 0.5, 0.9, 3), (1, 1.0, 0.8, 4), (2, 2, 1, 0)]:
        sampler = chain(temperature(t), top_k(5), top_p(p))
        jf.generate(
            made,
            params,
            draw.ids(2, 5, seed=seed),
            max_new_tokens=6,
            sampler=sampler,
            key=jax.random.key(seed),
            eos_id=end,
            pad_id=int(ends[seed]),
        )
    assert program.run._cache_size() == 1
    options = {"positions": jnp.asarray([[-1, 0, 1, 2, 3], [0, 1, 2, 3, -1]]), "eos_id": 1}
    list(jf.stream(made, params, draw.ids(2, 5), max_new_tokens=6, sampler=sampler, key=KEY, **options))
    # A stream runs the prompt with one program, and advances by one token with another for all of them.
    assert [function._cache_size() for function in compiled] == [1, 1, 1]


def test_generation_works_inside_of_jit():
    made, params = model(max_len=24)
    options = {"max_new_tokens": 6, "eos_id": 4}
    ids, positions = draw.ids(2, 5), jnp.asarray([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]])

    @jax.jit
    def inside(params, ids, positions, key, t):
        return jf.generate(made, params, ids, positions=positions, sampler=temperature(t), key=key, **options)

    outside = jf.generate(made, params, ids, positions=positions, sampler=temperature(1.5), key=KEY, **options)
    result = inside(params, ids, positions, KEY, 1.5)
    np.testing.assert_array_equal(result.ids, outside.ids)
    np.testing.assert_array_equal(result.lengths, outside.lengths)


def test_an_id_outside_the_vocabulary_under_jit_gives_nan_and_never_another_tokens_numbers():
    made, params = model(max_len=24)
    run = jax.jit(lambda ids: jf.generate(made, params, ids, max_new_tokens=3))
    result = run(jnp.asarray([[1, 29, 3], [1, 2, 3], [1, -1, 3]]))
    np.testing.assert_array_equal(np.isnan(result.logprobs).all(axis=1), [True, False, True])


def compiled_decode(capacity, loop="scan", kind="dense", **fields):
    made = jf.build(draw.tiny(max_len=capacity, **fields))
    ids = jax.ShapeDtypeStruct((2, 3), "int32")

    def start(ids):
        params = made.init(jax.random.key(0), ids)["params"]
        choice = Choice(jf.sampling.greedy, KEY, jnp.asarray([3]), jnp.asarray([[-1, 3], [4, 5]]), jnp.asarray(3))
        new = capacity - ids.shape[1]
        state = program.prefill(made, params, Prompt(ids, ids), choice, new=new, cache_kind=kind, num_samples=1)
        return params, state, choice

    params, state, choice = jax.eval_shape(start, ids)
    return program.decode.lower(made, params, state, choice, steps=8, loop=loop).compile(), state


@pytest.mark.parametrize("fields", [{}, {"scan_layers": True}, {"dtype": "bfloat16"}, {"loop": "while"}])
def test_the_cost_of_a_token_does_not_grow_with_the_capacity(fields):
    """The cache is changed where it lies, and nothing of its size is made besides: no copy and no conversion."""
    compiled, state = compiled_decode(4096, **fields)
    stored = {f"{leaf.shape}".strip("()").replace(" ", "") for leaf in jax.tree.leaves(state.cache.layers)}
    assert len(stored) == 1
    text = compiled.as_text()
    made = set(re.findall(rf"= \w+\[{stored.pop()}\]\S* ([\w-]+)\(", text))
    assert "dynamic-update-slice" in made
    assert made <= {"parameter", "get-tuple-element", "dynamic-update-slice", "fusion", "bitcast"}
    other = compiled_decode(16384, **fields)[0]
    sizes = [program.memory_analysis() for program in (compiled, other)]
    assert sizes[0].temp_size_in_bytes == sizes[1].temp_size_in_bytes
    for size in sizes:  # what is given is given back in place
        assert size.output_size_in_bytes - size.alias_size_in_bytes < 1000


def test_the_cache_has_room_for_the_prompt_and_the_new_tokens_and_no_more():
    made, params = model(max_len=24)
    prompt = make_prompt(made, draw.ids(2, 5), None, None, None)
    choice = checks._choice(29, jf.sampling.greedy, None, None, (), None)
    state = program.prefill(made, params, prompt, choice, new=6, cache_kind="dense", num_samples=1)
    assert state.cache.capacity == 11
