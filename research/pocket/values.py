"""Fillers of invented passages: invented names, thousands of ordinary words, numbers in many formats.

Everything here is a function of a `random.Random`, so that a seed fixes a corpus. `KINDS` maps the type of a slot
("person", "duration", ...) to its generator.
"""

# ruff: noqa: SIM905 (word lists read better as text)
from __future__ import annotations

from collections.abc import Callable
from random import Random

from research.pocket.words import all_words, some

ONSETS = "b br c ch cl d dr f fl g gr h j k kl l m n p pl qu r s sc sh sl st t th tr v w z b d f k l m n r s t".split()
VOWELS = "a e i o u a e i o u a e i o a y ai ea ou ei au ie oo".split()
CODAS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "nd", "rn", "x", "lt", "st", "ck", "th", "rd", "ng", "p", "g"]
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
COLORS = (
    "red blue green yellow black white grey brown orange purple pink silver gold violet turquoise crimson beige amber"
    " cyan ivory scarlet magenta maroon navy olive teal lilac bronze"
).split()
SMALL = "two three four five six seven eight nine ten eleven twelve".split()
UNITS = {
    "duration": "seconds minutes hours days weeks months years working~days nights business~days".split(),
    "distance": "metres kilometres miles feet km m yards centimetres".split(),
    "weight": "grams kilograms kg tonnes pounds g ounces kilos".split(),
    "size": "cm inches millimetres litres square~metres hectares gigabytes megabytes ml acres GB pages".split(),
}
CURRENCIES = "euros dollars pounds francs crowns pesos cents rupees yen".split()
DEPARTMENTS = (
    "Sales Support Finance Billing Security Accounting Logistics Planning Research Shipping Legal Training".split()
)
HEADS = "office team department desk unit service group".split()
SPOTS = "behind under in near beside opposite above inside next~to in~front~of at on outside".split()
DEGREES = (" degrees", " °C", " degrees Celsius", "°")
TITLES = "Dr Professor Captain Mrs Mr Judge Sister Inspector Lady Sir".split()
COMPANIES = "Group Labs Works Systems Foods Motors Ltd Bank Partners Brothers Software Textiles Press Airlines".split()
Maker = Callable[[Random], str]


def invented(random: Random, syllables: int | None = None) -> str:
    """A capitalised word that (almost surely) no one ever wrote."""
    count = syllables or random.choice((1, 2, 2, 2, 3))
    parts = (
        random.choice(ONSETS) + random.choice(VOWELS) + (random.choice(CODAS) if random.random() < 0.5 else "")
        for _ in range(count)
    )
    return "".join(parts)[:10].capitalize()


def first(random: Random) -> str:
    return some(random, "first") if random.random() < 0.85 else invented(random)


def last(random: Random) -> str:
    return some(random, "last") if random.random() < 0.6 else invented(random)


def person(random: Random) -> str:
    roll = random.random()
    if roll < 0.08:
        return f"{random.choice(TITLES)} {last(random)}"
    middle = f" {random.choice('ABCDEFGHJKLMNPRSTW')}." if roll > 0.95 else ""
    return f"{first(random)}{middle} {last(random)}"


def town(random: Random) -> str:
    roll = random.random()
    if roll < 0.5:
        return some(random, "town")
    tail = random.choice(("ville", "burg", "ton", "mouth", "ford", "field", "stad", "by", "ham")) if roll < 0.75 else ""
    return (
        (random.choice(("Port ", "New ", "Saint ", "Upper ", "East ")) if roll > 0.95 else "") + invented(random) + tail
    )


def country(random: Random) -> str:
    return invented(random, 2)[:7] + random.choice(("ia", "land", "stan", "ora", "ania", "", ""))


def company(random: Random) -> str:
    name = invented(random) if random.random() < 0.6 else last(random)
    return f"{name} {random.choice(COMPANIES)}" if random.random() < 0.55 else name


def product(random: Random) -> str:
    name = random.choice((invented(random), some(random, "adj").capitalize(), f"{invented(random)} {integer(random)}"))
    return f"{name} {some(random, 'thing')}" if random.random() < 0.75 else name


def integer(random: Random) -> str:
    roll = random.random()
    if roll < 0.35:
        return str(random.randint(2, 20))
    if roll < 0.75:
        return str(random.randint(11, 999))
    number = random.randint(1000, 99_999)
    return f"{number:,}" if random.random() < 0.6 else str(number)


def small(random: Random) -> str:
    return random.choice(SMALL) if random.random() < 0.55 else str(random.randint(2, 30))


def decimal(random: Random) -> str:
    return f"{random.randint(0, 60)}.{random.randint(1, 99)}" if random.random() < 0.3 else str(random.randint(2, 950))


def measure(kind: str) -> Maker:
    """A number with a unit of this kind."""

    def make(random: Random) -> str:
        unit = random.choice(UNITS[kind]).replace("~", " ")
        roll = random.random()
        if kind == "duration":
            if roll < 0.06:
                return random.choice(("half an hour", "a day", "an hour", "a week", "a fortnight", "a year", "a month"))
            return f"{small(random) if roll < 0.6 else random.randint(2, 120)} {unit}"
        return f"{decimal(random)} {unit}" if roll < 0.85 else f"{small(random)} {unit}"

    return make


def money(random: Random) -> str:
    roll, amount = random.random(), random.choice((random.randint(1, 99), random.randint(5, 2000)))
    if roll < 0.45:
        return f"{amount} {random.choice(CURRENCIES)}"
    if roll < 0.6:
        return f"{amount}.{random.randint(10, 99)} {random.choice(CURRENCIES[:3])}"
    return f"{random.choice('$€£')}{amount}" + (f".{random.randint(10, 99)}" if random.random() < 0.4 else "")


def date(random: Random) -> str:
    day, month, number = random.randint(1, 28), random.choice(MONTHS), random.randint(1700, 2030)
    return random.choice(
        (
            f"{day} {month}",
            f"{month} {day}",
            f"{day} {month} {number}",
            f"{month} {day}, {number}",
            f"the {ordinal(day)} of {month}",
        )
    )


def ordinal(number: int) -> str:
    tail = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{tail}"


def time(random: Random) -> str:
    hour, minute = random.randint(1, 12), random.choice((0, 15, 30, 45, 10, 20, 40, 5))
    return random.choice(
        (
            f"{random.randint(6, 23)}:{minute:02d}",
            f"{hour} {random.choice(('am', 'pm'))}",
            f"{hour}:{minute:02d} {random.choice(('am', 'pm', 'a.m.', 'p.m.'))}",
            f"{random.choice(('half past', 'quarter to', 'quarter past'))} {random.choice(SMALL)}",
            f"{random.choice(SMALL)} o'clock",
            random.choice(("noon", "midnight", "nine in the morning", "six in the evening")),
        )
    )


def place(random: Random) -> str:
    spot = random.choice(SPOTS).replace("~", " ")
    noun = some(random, "thing")
    return f"{spot} the {some(random, 'adj')} {noun}" if random.random() < 0.35 else f"{spot} the {noun}"


def phrase(random: Random) -> str:
    """A few arbitrary words, which a reader copies without understanding."""
    count = random.choice((1, 2, 2, 3, 4))
    body = " ".join(random.choice(all_words()) for _ in range(count))
    return random.choice(("", "the ", "a ", "its ", "")) + body


def action(random: Random) -> str:
    verb, noun = some(random, "verb"), some(random, "thing")
    return random.choice(
        (f"{verb} the {noun}", f"{verb} a {some(random, 'adj')} {noun}", f"{verb} {noun}s", f"{verb} it")
    )


def things(random: Random) -> str:
    noun = some(random, random.choice(("thing", "thing", "thing", "animal", "food")))
    plural = (
        noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
    )
    return f"{some(random, random.choice(('adj', 'material')))} {plural}" if random.random() < 0.3 else plural


def code(random: Random) -> str:
    letters = "".join(random.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(random.randint(1, 4)))
    digits = str(random.randint(2, 99_999))
    return random.choice((letters + digits, f"{letters}-{digits}", digits, f"{letters}{digits}-{random.randint(1, 9)}"))


def email(random: Random) -> str:
    user = random.choice((first(random).lower(), "help", "info", "support", some(random, "activity"), "office"))
    return f"{user}@{invented(random).lower()}.{random.choice(('com', 'org', 'net', 'example', 'eu'))}"


def phone(random: Random) -> str:
    digits = "".join(str(random.randint(0, 9)) for _ in range(8))
    return random.choice(
        (
            f"{digits[:3]} {digits[3:]}",
            f"0{digits[:2]}-{digits[2:]}",
            f"+{digits[:2]} {digits[2:5]} {digits[5:]}",
            digits[:6],
        )
    )


def department(random: Random) -> str:
    name = random.choice((random.choice(DEPARTMENTS), some(random, "activity").capitalize()))
    return f"the {random.choice((name, name.lower()))} {random.choice(HEADS)}" if random.random() < 0.6 else name


def listed(kind: str) -> Maker:
    return lambda random: some(random, kind)


KINDS: dict[str, Maker] = {
    "person": person, "first": first, "last": last, "name": invented, "town": town, "country": country,
    "company": company, "product": product, "date": date, "time": time, "int": integer, "small": small, "money": money,
    "place": place, "phrase": phrase, "action": action, "things": things, "code": code, "email": email, "phone": phone,
    "department": department, "duration": measure("duration"), "distance": measure("distance"),
    "weight": measure("weight"), "size": measure("size"), "thing": listed("thing"), "adj": listed("adj"),
    "material": listed("material"), "animal": listed("animal"), "plant": listed("plant"), "food": listed("food"),
    "job": listed("job"), "attribute": listed("attribute"),
    "year": lambda random: str(random.randint(1500, 2035)),
    "month": lambda random: random.choice(MONTHS),
    "weekday": lambda random: random.choice(DAYS),
    "color": lambda random: random.choice(COLORS),
    "percent": lambda random: f"{decimal(random)}{random.choice(('%', ' percent', ' per cent'))}",
    "temperature": lambda random: str(random.randint(-30, 250)) + random.choice(DEGREES),
    "age": lambda random: f"{random.randint(3, 95)}{random.choice(('', ' years'))}",
}  # fmt: skip
