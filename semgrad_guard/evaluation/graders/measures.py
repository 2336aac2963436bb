"""The same quantity in another unit: 26.2 miles are 42.2 kilometres.

Not times: an answer that says "21 days" where "three weeks" is right mostly speaks of something else.
"""

from __future__ import annotations

_MEASURES: tuple[dict[str, float], ...] = (
    {"kilometer": 1000, "meter": 1, "centimeter": 0.01, "millimeter": 0.001}
    | {"mile": 1609.344, "yard": 0.9144, "foot": 0.3048, "inch": 0.0254},
    {"tonne": 1e6, "kilogram": 1000, "gram": 1, "milligram": 0.001, "pound": 453.59237, "ounce": 28.349523},
    {"hectare": 10000, "acre": 4046.8564},
    {"liter": 1, "milliliter": 0.001},
    {"celsius": 1, "fahrenheit": 5 / 9, "kelvin": 1},
)
_ZEROS = {"fahrenheit": -160 / 9, "kelvin": -273.15}
_ROUGHLY, _CLOSELY, _EXACTLY = 0.01, 0.001, 1e-9


def is_convertible(unit: str, other: str) -> bool:
    """Two units of one kind."""
    return unit != other and any(unit in measure and other in measure for measure in _MEASURES)


def same_quantity(said: str, unit: str, wanted: str, other: str) -> bool:
    """Whether `said` in `unit` is `wanted` in `other`, both being digits with perhaps a decimal point.

    As far apart as rounding to the last digit of the coarser one explains, up to 1 %; 0.1 % always is near enough.
    """
    measure = next((each for each in _MEASURES if unit in each and other in each), None)
    if measure is None:
        return False
    scale, goal = measure[unit] / measure[other], float(wanted)
    found = float(said) * scale + (_ZEROS.get(unit, 0.0) - _ZEROS.get(other, 0.0)) / measure[other]
    rounding = max(_step(said) * scale, _step(wanted)) / 2
    return abs(found - goal) <= max(min(rounding, _ROUGHLY * abs(goal)), _CLOSELY * abs(goal), _EXACTLY)


def _step(number: str) -> float:
    """One in the last place."""
    return 10.0 ** -len(number.partition(".")[2])
