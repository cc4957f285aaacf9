"""Long material for the traffic sample: documents, code, logs, tables, support calls, made of parts.

Each maker is a stream of parts that `fill` joins until a number of tokens is reached. Tokens are estimated
from characters, so that the sample can be made again without a tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent

# Characters a token, measured on this material with the tokenizer of SmolLM2.
CHARS_PER_TOKEN = {
    "en": 4.43, "de": 2.56, "fr": 2.93, "es": 2.79, "it": 2.77, "pt": 2.62, "zh": 0.58, "ja": 0.57,
    "listing": 3.32, "log": 2.2, "table": 1.35, "transcript": 3.64,
}  # fmt: skip

PASSAGES: dict[str, list[dict[str, object]]] = yaml.safe_load((FOLDER / "passages.yaml").read_text("utf-8"))

ENTITIES = {
    "invoice": ("number", "customer", "total_cents"),
    "booking": ("code", "guest", "nights"),
    "sensor": ("serial", "room", "last_reading"),
    "parcel": ("tracking", "recipient", "weight_g"),
    "member": ("card", "name", "loans"),
    "tram": ("line", "depot", "mileage_km"),
    "recipe": ("slug", "title", "minutes"),
    "meter": ("point", "street", "kwh"),
    "ticket": ("key", "reporter", "priority"),
    "tree": ("tag", "species", "girth_cm"),
}

LISTINGS = (
    '''class {Name}Store:
    """Keeps {name}s in memory, by {a}."""

    def __init__(self) -> None:
        self._items: dict[str, {Name}] = {{}}

    def add(self, item: {Name}) -> None:
        if item.{a} in self._items:
            raise KeyError(f"{name} {{item.{a}}} is there already")
        self._items[item.{a}] = item

    def find(self, {b}: str) -> list[{Name}]:
        return [item for item in self._items.values() if item.{b} == {b}]
''',
    '''def parse_{name}(line: str) -> {Name}:
    """Reads `{a};{b};{c}` as the export writes it."""
    parts = line.strip().split(";")
    if len(parts) != 3:
        raise ValueError("expected {a};{b};{c}, got " + line)
    return {Name}({a}=parts[0], {b}=parts[1], {c}=int(parts[2]))
''',
    """def total_{c}({name}s: list[{Name}], {b}: str | None = None) -> int:
    total = 0
    for item in {name}s:
        if {b} is None or item.{b} == {b}:
            total += item.{c}
    return total
""",
    """def largest_{name}({name}s: list[{Name}]) -> {Name}:
    best = {name}s[0]
    for item in {name}s:
        if item.{c} > best.{c}:
            best = item
    return best
""",
    """def report_{name}s({name}s: list[{Name}]) -> str:
    rows = ["{a:<14} {b:<20} {c}"]
    for item in sorted({name}s, key=lambda item: item.{c}, reverse=True)[:{limit}]:
        rows.append(f"{{item.{a}:<14}} {{item.{b}:<20}} {{item.{c}}}")
    return "\\n".join(rows)
""",
)

SERVICES = ("gateway", "orders", "billing", "stock", "mailer", "auth", "search")
LOG_LINES = (
    "INFO request {id} GET /v2/items/{n} 200 in {ms} ms",
    "INFO cache refreshed, {n} entries, {ms} ms",
    "WARN slow query on table orders: {ms}4 ms, {n} rows",
    "WARN retry {r} of 5 for message {id}: connection reset by peer",
    "ERROR request {id} failed: upstream stock did not answer within {ms}0 ms",
    "ERROR pool exhausted: {n} of {n} connections in use",
    "INFO worker {r} took job {id} from the queue, {n} waiting",
    "INFO certificate valid for another {n} days",
)

SUPPLIERS = ("Halder & Sohn", "Quay Timber", "Norte Metal", "Lumen Glass", "Ferro Ostia", "Sakura Tools")
GOODS = ("oak shelf", "hinge 40 mm", "door handle", "glass pane", "floor oil", "bracket", "tile grey", "hose")

PEOPLE = ("Mrs Okafor", "Mr Lindqvist", "Ms Duarte", "Mr Tanaka", "Mrs Weiss", "Mr Rossi")
PRODUCTS = ("dishwasher", "router", "e-bike battery", "heat pump", "label printer", "robot mower")
CALL_LINES = (
    ("Customer", "The {product} stops after {n} minutes and shows error {code}."),
    ("Agent", "Thank you. Could you read me the serial number on the back, please?"),
    ("Customer", "It says {code}-{n}. The label is partly gone, the last digit may be a 3 or an 8."),
    ("Agent", "I have found it. It was bought in {year} and the guarantee runs for two more years."),
    ("Customer", "Good, because I have already waited {n} days for somebody to call back."),
    ("Agent", "I am sorry about that. Please switch it off, wait {n} seconds and switch it on again."),
    ("Customer", "The light is green now. Yesterday it was green as well, for about an hour."),
    ("Agent", "Then I will not close the ticket. A technician can come on the {n}th, before noon."),
    ("Customer", "Before noon is difficult. Could he ring me {n} minutes ahead?"),
    ("Agent", "I have written that down. He will bring the part for error {code} with him."),
    ("Customer", "And what does it cost if the part is not the reason?"),
    ("Agent", "The visit is free in any case, {name}, a part outside the guarantee would be {n} euros."),
)


def document(rng: random.Random, language: str) -> Iterator[str]:
    """Sections in a random order, each its heading and its paragraphs; begins anew when all are used."""
    while True:
        sections = list(PASSAGES[language])
        rng.shuffle(sections)
        for section in sections:
            paragraphs = section["paragraphs"]
            assert isinstance(paragraphs, list)
            first = rng.randrange(len(paragraphs))
            yield f"# {section['title']}"
            for paragraph in paragraphs[first:] + paragraphs[:first]:
                # YAML folds a line end into a space, which these two scripts do not have.
                yield paragraph.replace(" ", "") if language in ("zh", "ja") else paragraph


def listing(rng: random.Random) -> Iterator[str]:
    """Python definitions about a few kinds of record."""
    while True:
        entities = list(ENTITIES.items())
        rng.shuffle(entities)
        for name, (a, b, c) in entities:
            yield (f"@dataclass\nclass {name.capitalize()}:\n    {a}: str\n    {b}: str\n    {c}: int\n")
            for template in rng.sample(LISTINGS, 4):
                yield template.format(Name=name.capitalize(), name=name, a=a, b=b, c=c, limit=rng.randrange(5, 30))


def log(rng: random.Random) -> Iterator[str]:
    """Lines of a service's log with rising times."""
    second = rng.randrange(20_000, 60_000)
    while True:
        second += rng.randrange(0, 4)
        clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.{rng.randrange(1000):03d}"
        fill_in = {"id": f"{rng.getrandbits(24):06x}", "n": rng.randrange(3, 90), "ms": rng.randrange(4, 900)}
        yield f"{clock} {rng.choice(SERVICES)} " + rng.choice(LOG_LINES).format(r=rng.randrange(1, 6), **fill_in)


def table(rng: random.Random) -> Iterator[str]:
    """A CSV export of orders, its heading first."""
    yield "order,supplier,article,quantity,due,delivered"
    number = rng.randrange(10_000, 40_000)
    while True:
        number += rng.randrange(1, 9)
        month, day, late = rng.randrange(1, 13), rng.randrange(1, 22), rng.choice((0, 0, 0, 1, 2, 6))
        yield (
            f"{number},{rng.choice(SUPPLIERS)},{rng.choice(GOODS)},{rng.randrange(1, 140)},"
            f"2024-{month:02d}-{day:02d},2024-{month:02d}-{day + late:02d}"
        )


def transcript(rng: random.Random) -> Iterator[str]:
    """Support calls, one after the other."""
    while True:
        fixed = {"product": rng.choice(PRODUCTS), "name": rng.choice(PEOPLE), "year": rng.randrange(2019, 2025)}
        yield f"Call of {fixed['name']} about a {fixed['product']}"
        for who, line in CALL_LINES:
            if rng.random() < 0.85:
                code = f"{rng.choice('EFH')}{rng.randrange(10, 99)}"
                yield f"{who}: " + line.format(code=code, n=rng.randrange(4, 29), **fixed)


def fill(kind: str, language: str, tokens: float, rng: random.Random) -> str:
    """Material of a kind (`document`, `listing`, `log`, `table`, `transcript`) of about `tokens` tokens."""
    makers = {"listing": listing, "log": log, "table": table, "transcript": transcript}
    parts = document(rng, language) if kind == "document" else makers[kind](rng)
    separator = "\n" if kind in ("log", "table", "transcript") else "\n\n"
    wanted = tokens * CHARS_PER_TOKEN[language if kind == "document" else kind]
    text = next(parts)
    while len(text) < wanted:
        text += separator + _trimmed(next(parts), wanted - len(text))
    return text


def _trimmed(part: str, room: float) -> str:
    """As many whole sentences or lines as fit, at least one."""
    if len(part) <= room:
        return part
    ends = [
        at + 1
        for at, mark in enumerate(part)
        if mark in "。\n" or (mark == "." and part[at + 1 : at + 2] in ("", " ", "\n"))
    ]
    return part[: min(ends or [len(part)], key=lambda end: abs(end - room))].rstrip()


def tokens_of(text: str, kind: str) -> float:
    """Estimated tokens of a text in a language or of a kind of material."""
    return len(text) / CHARS_PER_TOKEN[kind]
