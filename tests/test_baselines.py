"""The vectorised Kneser-Ney model equals one written with dictionaries, and is a distribution."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from baselines import SYMBOLS, fit, kneser_ney_nats_per_byte, probabilities
from hypothesis import given
from hypothesis import strategies as st

END, BEGIN = 256, 257
Gram = tuple[int, ...]

CORPUS = ["abracadabra", "abba", "a", "", "cadabra\xff\xff", "die Kätzchen", "abracadabra"]
documents = st.lists(st.text(alphabet="abc\xff", max_size=12), min_size=1, max_size=6)


class Slow:
    """Interpolated Kneser-Ney from the definition, with dictionaries of tuples."""

    def __init__(self, texts: list[str], order: int) -> None:
        self.order = order
        occurrences = Counter(gram for text in texts for gram in self.grams(text))
        self.counts: dict[int, Counter[Gram]] = {order: occurrences}
        for k in range(order - 1, 0, -1):
            left = defaultdict(set)
            for gram in occurrences:
                left[gram[-k:]].add(gram[-k - 1])
            self.counts[k] = Counter({gram: len(symbols) for gram, symbols in left.items()})

    def grams(self, text: str) -> list[Gram]:
        symbols = (BEGIN,) * (self.order - 1) + tuple(text.encode()) + (END,)
        return [symbols[i : i + self.order] for i in range(len(symbols) - self.order + 1)]

    def probability(self, gram: Gram) -> float:
        if not gram:
            return 1 / 257
        counts = self.counts[len(gram)]
        after = {seen[-1]: count for seen, count in counts.items() if seen[:-1] == gram[:-1]}
        if not after:
            return self.probability(gram[1:])
        n1, n2 = (sum(count == n for count in counts.values()) for n in (1, 2))
        discount = n1 / (n1 + 2 * n2) if n1 else 0.5
        kept = max(after.get(gram[-1], 0) - discount, 0)
        return (kept + discount * len(after) * self.probability(gram[1:])) / sum(after.values())

    def nats_per_byte(self, texts: list[str]) -> float:
        total = sum(math.log(self.probability(gram)) for text in texts for gram in self.grams(text))
        return -total / sum(len(text.encode()) for text in texts)


def number(gram: Gram) -> int:
    return sum(symbol * 258**i for i, symbol in enumerate(reversed(gram)))


@pytest.mark.parametrize("order", range(1, 8))
def test_it_equals_the_definition(order: int) -> None:
    validation = ["abracadab", "xyz abba", "", "\xff\xff\U0001f600", "a"]
    slow = Slow(CORPUS, order)
    assert kneser_ney_nats_per_byte(CORPUS, validation, order) == pytest.approx(slow.nats_per_byte(validation), 1e-12)


@given(train=documents, validation=documents, order=st.integers(1, 4))
def test_it_equals_the_definition_on_any_corpus(train: list[str], validation: list[str], order: int) -> None:
    validation = [*validation, "b"]
    slow = Slow(train, order).nats_per_byte(validation)
    assert kneser_ney_nats_per_byte(train, validation, order) == pytest.approx(slow, 1e-12)


@given(train=documents, context=st.lists(st.sampled_from([*b"abcdz\xff\xc3\xbf", BEGIN]), min_size=6, max_size=6))
@pytest.mark.parametrize("order", [1, 2, 3, 7])
def test_probabilities_after_any_context_sum_to_one(order: int, train: list[str], context: list[int]) -> None:
    before = context[len(context) - order + 1 :]
    grams = np.array([number((*before, symbol)) for symbol in range(SYMBOLS)], np.uint64)
    after = probabilities(fit(train, order), grams)
    assert after.sum() == pytest.approx(1.0, abs=1e-12)
    assert after.min() > 0


@given(train=documents, order=st.integers(1, 5))
def test_the_order_of_documents_does_not_matter(train: list[str], order: int) -> None:
    validation = ["abcab"]
    forward = kneser_ney_nats_per_byte(train, validation, order)
    assert kneser_ney_nats_per_byte(train[::-1], validation, order) == forward


def test_ends_count_in_the_loss_but_not_in_its_denominator() -> None:
    # One end was counted, once: the discount is 1 and all 257 symbols stay equally likely.
    assert kneser_ney_nats_per_byte([""], ["zz", ""], 1) == pytest.approx(4 * math.log(257) / 2)


def test_longer_grams_predict_regular_text_better() -> None:
    train, validation = ["the cat sat on the mat. " * 20], ["the mat sat on the cat. "]
    losses = [kneser_ney_nats_per_byte(train, validation, order) for order in (1, 2, 4)]
    assert losses == sorted(losses, reverse=True)
    assert kneser_ney_nats_per_byte(train, validation) < 0.6 * losses[0]


@pytest.mark.parametrize("order", [0, 8])
def test_orders_that_do_not_fit_are_refused(order: int) -> None:
    with pytest.raises(ValueError, match=rf"order={order} is outside 1 ... 7"):
        kneser_ney_nats_per_byte(CORPUS, CORPUS, order)


def test_nothing_to_count_or_to_score_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no documents"):
        kneser_ney_nats_per_byte([], CORPUS)
    with pytest.raises(ValueError, match="validation holds no bytes"):
        kneser_ney_nats_per_byte(CORPUS, [""])
