"""Learning rates over a run."""

import numpy as np
import oracle
import pytest
from draw import close
from hypothesis import given
from hypothesis import strategies as st
from tolerances import FLOAT32

from jaxformer.schedules import SCHEDULES, warmup_cosine, warmup_inverse_sqrt, warmup_linear, warmup_stable_decay


@given(st.integers(0, 20), st.integers(1, 30), st.floats(1e-5, 1.0), st.floats(0, 1), st.integers(0, 60))
def test_the_schedule_is_the_oracles(warmup, after, peak, final_fraction, step):
    total = warmup + after
    schedule = warmup_cosine(peak, warmup, total, final_fraction)
    expected = oracle.warmup_cosine(step, peak=peak, warmup=warmup, total=total, final_fraction=final_fraction)
    close(schedule(step), expected, FLOAT32)


def test_the_schedule_starts_at_zero_peaks_after_the_warm_up_and_ends_at_a_tenth():
    schedule = warmup_cosine(0.5, 10, 110)
    close([schedule(step) for step in (0, 5, 10, 60, 110, 500)], [0, 0.25, 0.5, 0.275, 0.05, 0.05], FLOAT32)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (11, 10), (-1, 10), (0, 0)])
def test_a_warm_up_ends_before_the_run(name, warmup, total):
    with pytest.raises(ValueError, match=f"warmup_steps={warmup} must be at least 0 and below num_steps={total}"):
        SCHEDULES[name](1e-3, warmup, total)


@given(st.integers(0, 20), st.integers(1, 30), st.floats(0, 1), st.integers(0, 60), st.data())
def test_lines_and_plateaus_are_their_definitions(warmup, after, final, step, data):
    total = warmup + after
    fall = data.draw(st.integers(1, after))
    down = np.interp(step, [total - fall, total], [1.0, final])
    rise = step / warmup if step < warmup else 1.0
    close(warmup_stable_decay(0.3, warmup, total, final, decay_steps=fall)(step), 0.3 * min(rise, down), FLOAT32)
    down = np.interp(step, [warmup, total], [1.0, final])
    close(
        warmup_linear(0.3, warmup, total, final)(step), 0.3 * min(rise, down) if step < warmup else 0.3 * down, FLOAT32
    )


def test_a_plateau_ends_a_fifth_before_the_end():
    schedule = warmup_stable_decay(1.0, 10, 100)
    close([schedule(step) for step in (0, 5, 10, 80, 90, 100)], [0, 0.5, 1, 1, 0.5, 0], FLOAT32)
    assert warmup_stable_decay(1.0, 9, 10)(9) == 1.0  # one step is left


@given(st.integers(1, 40), st.integers(0, 4000))
def test_the_inverse_root_is_that_of_the_paper(warmup, step):
    d_model = 512
    schedule = warmup_inverse_sqrt((d_model * warmup) ** -0.5, warmup, 5000)
    paper = d_model**-0.5 * min(max(step, 1) ** -0.5, step * warmup**-1.5)
    np.testing.assert_allclose(schedule(step), paper, rtol=1e-5)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="warmup_steps=0 must be at least 1"):
        warmup_inverse_sqrt(1e-3, 0, 10)
    with pytest.raises(ValueError, match="decay_steps=8 must be from 1 to the 7 steps"):
        warmup_stable_decay(1e-3, 3, 10, decay_steps=8)
