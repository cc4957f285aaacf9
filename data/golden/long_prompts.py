"""Long prompts of the golden set, up to the context of the model.

Many examples: the same task some ten to hundreds of times, then once more. A document: one fact is planted in
it and asked for at the end, so that the answer needs keys from hundreds to thousands of tokens ago. Lengths
are estimated from characters, as for the traffic sample.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data.traffic.material import fill

SEED = 20261130
TEMPLATE_TOKENS = 60  # the system text and the last question

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Ella", "Finn", "Gwen", "Hugo", "Iris", "Jonas", "Kira", "Lars", "Mona", "Nils",
         "Olga", "Paul", "Rosa", "Sven", "Tara", "Udo", "Vera", "Wim", "Yara", "Zeno")  # fmt: skip
THINGS = {
    "en": ("lamp", "rope", "mirror", "kettle", "ladder", "drum", "carpet", "bucket", "anchor", "candle", "saddle",
           "compass", "basket", "hammer", "blanket", "lantern"),
    "de": ("Lampe", "Tasse", "Leiter", "Trommel", "Kerze", "Decke", "Jacke", "Uhr", "Gabel", "Kiste", "Bank", "Vase"),
    "fr": ("lampe", "tasse", "table", "porte", "chaise", "robe", "veste", "montre", "caisse", "corde", "clef", "malle"),
    "es": ("mesa", "silla", "taza", "puerta", "caja", "cuerda", "vela", "manta", "llave", "cesta", "barca", "carta"),
    "it": ("tavola", "sedia", "tazza", "porta", "scatola", "corda", "candela", "coperta", "chiave", "cesta", "barca"),
    "pt": ("mesa", "cadeira", "porta", "caixa", "corda", "vela", "manta", "chave", "cesta", "barca", "carta", "faca"),
}  # fmt: skip
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "grey", "brown")


@dataclass(frozen=True)
class Task:
    """One long prompt before it is a line of the file."""

    category: str
    language: str
    name: str
    shots: list[tuple[str, Any]]
    asked: str
    answer: Any
    contains: bool = False


@dataclass(frozen=True)
class Repeated:
    """One task to be shown many times; {a} and {b} are two things, {name}, {colour} and {n} are drawn too."""

    category: str
    language: str
    name: str
    asked: str
    answer: str
    shot_tokens: float  # of one example with its turns, measured with the tokenizer of SmolLM2
    lengths: tuple[int, ...]  # prompt tokens, about


REPEATED = (
    Repeated("copy", "en", "many-notes",
             "Copy: {name} has the {colour} {a}", "{name} has the {colour} {a}", 24.3, (950, 3900)),
    Repeated("copy", "es", "many-notas",
             "Copia: {name} lleva la {a}", "{name} lleva la {a}", 29.2, (450, 1900)),
    Repeated("answer", "en", "many-colours",
             "{name} has a {colour} {a}. What colour is the {a}?", "{colour}", 24.8, (950, 1900)),
    Repeated("answer", "pt", "many-objetos",
             "{name} perdeu a {a}. Quem perdeu a {a}?", "{name}", 30.5, (450, 950)),
    Repeated("json", "en", "many-cards",
             "{name}, card {n}", '{{"name": "{name}", "card": {n}}}', 31.6, (950, 6000)),
    Repeated("json", "it", "many-prezzi",
             "{a} {n} euro", '{{"oggetto": "{a}", "prezzo": {n}}}', 34.5, (450, 1900)),
    Repeated("tool_call", "en", "many-finds",
             "Find the {a} of {name}", 'find(thing="{a}", owner="{name}")', 28.1, (950, 3900)),
    Repeated("tool_call", "de", "many-kaeufe",
             "Kaufe {n} mal {a}", 'buy(item="{a}", count={n})', 31.6, (450, 1900)),
    Repeated("format", "en", "many-lists", "List: {a}, {b}", "- {a}\n- {b}", 20.8, (450, 1900)),
    Repeated("format", "fr", "many-listes", "Liste : {a}, {b}", "- {a}\n- {b}", 24.4, (950,)),
)  # fmt: skip

# language -> (planted sentence, question, answer); asked for after the document.
PLANTED = {
    "en": (("The password of the library is sunflower.", "What is the password of the library?", "sunflower"),
           ("The captain of the ship is Oskar.", "Who is the captain of the ship?", "Oskar"),
           ("The treasure is hidden in Zanzibar.", "Where is the treasure hidden?", "Zanzibar")),
    "de": (("Das Passwort im Haus lautet Sonnenblume.", "Wie lautet das Passwort im Haus?", "Sonnenblume"),),
    "fr": (("Le mot de passe de la maison est tournesol.", "Quel est le mot de passe de la maison ?", "tournesol"),),
    "es": (("La contraseña de la casa es girasol.", "¿Cuál es la contraseña de la casa?", "girasol"),),
    "it": (("La parola segreta della casa è girasole.", "Qual è la parola segreta della casa?", "girasole"),),
    "pt": (("A senha da casa é girassol.", "Qual é a senha da casa?", "girassol"),),
}  # fmt: skip
DOCUMENTS = (("en", 0, 450), ("en", 1, 1900), ("en", 2, 7600), ("en", 2, 950), ("de", 0, 450), ("fr", 0, 950),
             ("es", 0, 450), ("it", 0, 950), ("pt", 0, 450))  # fmt: skip


def long_tasks() -> Iterator[Task]:
    """The tasks of many examples, then the documents."""
    for repeated in REPEATED:
        for target in repeated.lengths:
            yield _many_shots(repeated, target, random.Random(f"{SEED}-{repeated.name}-{target}"))  # noqa: S311
    for language, number, target in DOCUMENTS:
        yield _document(language, number, target, random.Random(f"{SEED}-{language}-{number}-{target}"))  # noqa: S311


def _many_shots(repeated: Repeated, target: int, rng: random.Random) -> Task:
    num_shots = round((target - TEMPLATE_TOKENS) / repeated.shot_tokens)
    turns: dict[str, str] = {}  # no question twice: an example must not give the last one away
    while len(turns) <= num_shots:
        a, b = rng.sample(THINGS[repeated.language], 2)
        drawn = {"a": a, "b": b, "name": rng.choice(NAMES), "colour": rng.choice(COLOURS), "n": rng.randrange(2, 100)}
        turns.setdefault(repeated.asked.format(**drawn), repeated.answer.format(**drawn))
    asked, answer = turns.popitem()
    return Task(repeated.category, repeated.language, f"{repeated.name}-{target}", list(turns.items()), asked, answer)


def _document(language: str, number: int, target: int, rng: random.Random) -> Task:
    sentence, question, answer = PLANTED[language][number]
    paragraphs = fill("document", language, target - TEMPLATE_TOKENS - 30, rng).split("\n")
    paragraphs[rng.randrange(len(paragraphs))] += f" {sentence}"
    asked = "\n".join(paragraphs) + f"\n\n{question}"
    return Task("answer", language, f"document-{language}-{number + 1}-{target}", [], asked, answer, contains=True)
