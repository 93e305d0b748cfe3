"""Batches hold each label once, keep documents apart, and are a function of (seed, number)."""

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.data import Batch, Windows, check_vocabulary, encode_documents, eval_batches, train_batches

END = 9


class Digits:
    """A tokenizer whose ids are the digits of a text."""

    end_id = END

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(digit) for digit in text] for text in texts]


documents = st.lists(st.text(alphabet="012345678", max_size=12), min_size=1, max_size=8)
lengths = st.integers(1, 15)


def stream_of(texts: list[str]) -> np.ndarray:
    return encode_documents(Digits(), texts)


def numbered(count: int) -> Windows:
    """Return `count` windows of length 2 whose first id tells their number."""
    return Windows(np.arange(2 * count + 1), length=2, end_id=10**6)


def first_ids(batches: Sequence[Batch]) -> list[list[int]]:
    return [(np.asarray(batch.ids)[:, 0] // 2).tolist() for batch in batches]


@given(texts=documents)
def test_end_stands_before_each_document_and_at_the_end(texts: list[str]) -> None:
    stream = stream_of(texts)
    assert stream.dtype == np.int32
    assert "".join(map(str, stream)) == "9" + "9".join(texts) + "9"


def test_many_documents_are_one_stream() -> None:
    texts = [str(10**6 + i).replace("9", "0") for i in range(1000)]
    assert "".join(map(str, stream_of(texts))) == "9" + "9".join(texts) + "9"


@given(texts=documents, length=lengths)
def test_each_token_but_the_first_is_a_label_once(texts: list[str], length: int) -> None:
    stream = stream_of(texts)
    windows = list(Windows(stream, length, END))
    ids, labels, weights = (np.concatenate([w[name] for w in windows]) for name in ("ids", "labels", "weights"))
    assert weights.sum() == len(stream) - 1
    assert ids[weights == 1].tolist() == stream[:-1].tolist()
    assert labels[weights == 1].tolist() == stream[1:].tolist()
    assert (labels[weights == 1] == END).sum() == len(texts)  # every document teaches to stop


@given(texts=documents, length=lengths)
def test_tokens_share_a_segment_if_and_only_if_they_share_a_document(texts: list[str], length: int) -> None:
    stream = stream_of(texts)
    document = list(itertools.accumulate(int(token == END) for token in stream[:-1]))
    for i, window in enumerate(Windows(stream, length, END)):
        here = np.array(document[i * length : (i + 1) * length])
        segments = window["segments"][: len(here)]
        assert ((segments[:, None] == segments) == (here[:, None] == here)).all()
        assert sorted(set(segments.tolist())) == list(range(1, len(set(here.tolist())) + 1))
        for segment in set(segments.tolist()):
            positions = window["positions"][: len(here)][segments == segment]
            assert positions.tolist() == list(range(len(positions)))


@given(texts=documents, length=lengths)
def test_padding_is_the_end_of_the_last_window(texts: list[str], length: int) -> None:
    stream = stream_of(texts)
    windows = list(Windows(stream, length, END))
    assert all(window["weights"].all() for window in windows[:-1])
    count = len(stream) - 1 - (len(windows) - 1) * length
    assert 1 <= count <= length
    padding = {"ids": END, "labels": END, "weights": 0, "positions": -1, "segments": 0}
    for name, value in padding.items():
        assert (windows[-1][name][count:] == value).all()
    assert windows[-1]["weights"][:count].all()
    assert (windows[-1]["positions"][:count] >= 0).all()


def test_a_window_of_the_example() -> None:
    first, second = Windows(stream_of(["123", "45"]), length=4, end_id=END)
    assert {name: row.tolist() for name, row in first.items()} == {
        "ids": [9, 1, 2, 3],
        "labels": [1, 2, 3, 9],
        "weights": [1, 1, 1, 1],
        "positions": [0, 1, 2, 3],
        "segments": [1, 1, 1, 1],
    }
    assert {name: row.tolist() for name, row in second.items()} == {
        "ids": [9, 4, 5, 9],
        "labels": [4, 5, 9, 9],
        "weights": [1, 1, 1, 0],
        "positions": [0, 1, 2, -1],
        "segments": [1, 1, 1, 0],
    }


def test_windows_of_a_mapped_file_are_those_of_the_array(tmp_path: Path) -> None:
    stream = stream_of(["12345678", "", "8765"])
    stream.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    mapped = Windows(np.memmap(tmp_path / "tokens.bin", np.uint16, "r"), 4, END)
    windows = Windows(stream, 4, END)
    assert repr(mapped) == repr(windows) == "Windows(tokens=16, length=4, end_id=9)"
    for left, right in zip(mapped, windows, strict=True):
        for name in left:
            assert left[name].dtype == right[name].dtype == (np.float32 if name == "weights" else np.int32)
            assert (left[name] == right[name]).all()


def test_windows_are_a_source_for_grain() -> None:
    windows = Windows(stream_of(["123", "45"]), 2, END)
    assert [row["ids"].tolist() for row in grain.MapDataset.source(windows)] == [row["ids"].tolist() for row in windows]
    for index in (-1, len(windows)):
        with pytest.raises(IndexError, match=f"window {index} is not one of the 4 windows"):
            windows[index]
    with pytest.raises(ValueError, match="window -1 is negative"):
        windows.batch(np.array([0, -1]))


def test_a_batch_is_a_pytree() -> None:
    batch = next(eval_batches(numbered(3), 2))
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: 2 * x, b))(batch)
    assert isinstance(doubled, Batch)
    for name, value in vars(batch).items():
        assert isinstance(value, np.ndarray)
        assert (np.asarray(getattr(doubled, name)) == 2 * value).all()


@pytest.mark.parametrize(("count", "batch_size"), [(10, 2), (7, 3), (3, 5), (1, 2), (4, 1), (1, 1)])
def test_each_epoch_has_every_window_once_in_its_own_order(count: int, batch_size: int) -> None:
    batches = list(itertools.islice(train_batches(numbered(count), batch_size, seed=3), 6 * count))
    assert all(batch.ids.shape == (batch_size, 2) for batch in batches)
    order = list(itertools.chain(*first_ids(batches)))
    epochs = [tuple(order[i : i + count]) for i in range(0, len(order), count)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(count))}
    assert len(set(epochs)) > 1 or count == 1


def test_seeds_give_different_orders() -> None:
    orders = {str(first_ids(list(itertools.islice(train_batches(numbered(50), 10, s), 10)))) for s in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("steps", [0, 3, 5, 7, 8, 23])
def test_resuming_continues_exactly_in_every_epoch(steps: int) -> None:
    # 10 windows in batches of 2: five batches an epoch.
    whole = list(itertools.islice(train_batches(numbered(10), 2, seed=1), steps + 12))
    stopped = train_batches(numbered(10), 2, seed=1)
    for _ in range(steps):
        next(stopped)
    state = json.loads(json.dumps(stopped.get_state()))
    resumed = train_batches(numbered(10), 2, seed=1)
    resumed.set_state(state)
    rest = [next(resumed) for _ in range(12)]
    assert first_ids(rest) == first_ids(whole[steps:])
    for left, right in zip(rest, whole[steps:], strict=True):
        assert all((getattr(left, name) == value).all() for name, value in vars(right).items())


def test_resuming_in_another_process_continues_exactly() -> None:
    iterator = train_batches(numbered(10), 2, seed=1)
    for _ in range(8):
        next(iterator)
    code = f"""
import numpy as np
from jaxformer.data import Windows, train_batches
iterator = train_batches(Windows(np.arange(21), 2, 10**6), 2, 1)
iterator.set_state({iterator.get_state()!r})
print([(next(iterator).ids[:, 0] // 2).tolist() for _ in range(12)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == first_ids([next(iterator) for _ in range(12)])


@given(texts=documents, length=lengths, batch_size=st.integers(1, 5))
def test_evaluation_has_each_window_once_in_order_and_one_shape(texts: list[str], length: int, batch_size: int) -> None:
    windows = Windows(stream_of(texts), length, END)
    batches = list(eval_batches(windows, batch_size))
    assert len(batches) == -(-len(windows) // batch_size)
    for name in ("ids", "labels", "weights", "positions", "segments"):
        assert {getattr(batch, name).shape for batch in batches} == {(batch_size, length)}
        rows = np.concatenate([getattr(batch, name) for batch in batches])
        assert (rows[: len(windows)] == np.stack([window[name] for window in windows])).all()
    padding = vars(batches[-1])
    count = len(windows) - (len(batches) - 1) * batch_size
    values = {"ids": END, "labels": END, "weights": 0, "positions": -1, "segments": 0}
    assert all((padding[name][count:] == value).all() for name, value in values.items())


@pytest.mark.parametrize(("stream", "bad", "at"), [([1, 8, 9], 8, 1), ([0, -1], -1, 1), ([100], 100, 0)])
def test_ids_outside_the_model_are_refused(stream: list[int], bad: int, at: int) -> None:
    check_vocabulary(np.array([0, 7, 3]), 8)
    with pytest.raises(ValueError, match=rf"id {bad} \(token {at} of the stream\) is outside .*vocab_size=8"):
        check_vocabulary(np.array(stream), 8)


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no documents"):
        stream_of([])
    for stream in ([], [9]):
        with pytest.raises(ValueError, match=f"a stream of {len(stream)} tokens has no token to predict"):
            Windows(np.array(stream, np.int32), 4, END)
    with pytest.raises(ValueError, match=r"the stream is float64\[2\]; it must be one row of integer ids"):
        Windows(np.zeros(2), 4, END)
    with pytest.raises(ValueError, match=r"the stream is int32\[2, 3\]; it must be one row"):
        Windows(np.zeros((2, 3), np.int32), 4, END)
    with pytest.raises(ValueError, match="length=0 is below 1"):
        Windows(np.zeros(2, np.int32), 0, END)


def test_sizes_and_seeds_outside_their_ranges_are_refused() -> None:
    for make in (lambda size: train_batches(numbered(3), size, 0), lambda size: eval_batches(numbered(3), size)):
        with pytest.raises(ValueError, match="batch_size=0 is below 1"):
            make(0)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed={seed} is outside"):
            train_batches(numbered(3), 2, seed)
