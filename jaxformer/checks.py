"""Checks of the numbers in a config; the messages name the value, the requirement and the field."""

import math
from typing import Any


def check_positive(name: str, value: Any, optional: bool = False) -> None:
    """Refuses what is not a positive finite number."""
    if not (optional and value is None) and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise ValueError(f"{name}={value!r} must be a positive finite number")


def check_size(name: str, value: Any, optional: bool = False) -> None:
    """Refuses what is not an integer of at least 1."""
    if not (optional and value is None) and (type(value) is not int or value < 1):
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses what is not one of the names."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {list(choices)}")


def check_flag(name: str, value: Any, optional: bool = False) -> None:
    """Refuses what is not true or false."""
    if not (optional and value is None) and type(value) is not bool:
        raise ValueError(f"{name}={value!r} must be true or false")


def check_rate(name: str, value: Any) -> None:
    """Refuses what is not a share below 1."""
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be a number from 0 up to, but without, 1")
