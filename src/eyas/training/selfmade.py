"""Prompts that the target writes itself: what each one begins with, so that together they are of many kinds.

An aligned model that is given its own template's user header goes on with a question. Left alone it asks much the same
again and again, so most prompts get a seeded beginning: a kind of task, and something it is about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from eyas.core import UsageError
from eyas.training.topics import CODE, COUNTRIES, NAMES, PROGRAMS, ROLES, SYSTEMS, THINGS, TONGUES, TOPICS

# A beginning that ends a sentence is a whole prompt; every other one is continued by the target.
KINDS: Mapping[str, Sequence[str]] = {
    "free": ("",),
    "explain": (
        "Explain {topic} in simple terms.",
        "Explain how",
        "Explain why {topic}",
        "Can you explain",
        "What is the difference between",
        "How does {topic} work?",
        "Why is {topic} important?",
        "What are the main ideas behind {topic}?",
        "I don't understand {topic}.",
        "What happens when",
        "Explain {topic} to a five-year-old.",
        "Describe",
        "In the context of {topic}, what",
        "I'm curious about {topic}. Why",
    ),
    "code": (
        "Write a {code} function that {program}.",
        "Write a {code} function that",
        "Write a {code} program that {program}.",
        "Write a {code} program",
        "Write a {code} class",
        "Implement a {code} function that {program}. Explain how it works.",
        "How do I",
        "In {code}, how can I",
        "Fix the bug in this {code} code:\n\n```\n",
        "What does this {code} code do?\n\n```\n",
        "Complete the following {code} function:\n\n```python\ndef",
        "Complete this code so that it {program}:\n\n```\n",
        "Write unit tests for a {code} function that {program}.",
        "Write a SQL query that",
        "Write a regular expression that",
        "Write a shell command to",
        "Write an HTML page about {topic} with",
        "Refactor this {code} code to be easier to read:\n\n```\n",
        "I get an error in {code}:",
        "Show me a short example of {code} code that {program}.",
        'def {word}(n):\n    """',
        "Explain the difference between",
    ),
    "maths": (
        "{name} has {a} {things}. {name} gives {b} of them to {other}",
        "{name} buys {a} {things} for ${b} each",
        "A shop sells {things}",
        "A train",
        "There are {a} {things} in a box",
        "{name} and {other} share",
        "If {name} works {b} hours a day",
        "A rectangle has a length of {a} cm",
        "Solve for x:",
        "Solve: ",
        "Calculate {a} * {b}.",
        "Calculate {a} + {b} * {c}, step by step.",
        "What is {b}% of {a}?",
        "What is {a} divided by {b}?",
        "What is the probability that",
        "Find the derivative of",
        "Find the area of",
        "Simplify the expression",
        "Convert {a} kilometres to miles.",
        "Prove that",
        "A recipe for {b} people needs",
        "How many ways are there to",
        "The sum of two numbers is {a}",
        "Think step by step. {name} is {b} years old and",
        "In a class of {a} students,",
    ),
    "translate": (
        "Translate into {tongue}: ",
        "Translate the following sentence to {tongue}:\n\n",
        "Translate this to {tongue}: The",
        "How do you say",
        "What does the {tongue} word",
        'Translate "I',
        "Write a short dialogue in {tongue} about {topic}.",
        "Translate the following paragraph about {topic} into {tongue}:\n\n",
    ),
    "summarise": (
        "Summarize the following text:\n\n",
        "Summarize the following paragraph about {topic} in one sentence:\n\n",
        "Summarise this article in three bullet points:\n\n",
        "What is the main idea of this passage?\n\n",
        "Read the passage and answer the question.\n\nPassage: ",
        "Give this text a title:\n\n",
        "Extract the key facts from this text about {topic}:\n\n",
        "TL;DR of the following:\n\n",
        "Summarize what you know about {topic}.",
    ),
    "rewrite": (
        "Rewrite this sentence to sound more formal: ",
        "Rewrite the following e-mail to be more polite:\n\n",
        "Fix the grammar in this text: ",
        "Correct the spelling: ",
        "Paraphrase: ",
        "Make this paragraph about {topic} shorter:\n\n",
        "Turn this into a list:\n\n",
        "Rewrite in the style of {role}: ",
        "Change this sentence to the passive voice: ",
        "Improve this text:\n\n",
        "Make this sound friendlier: ",
        "Convert the following text to JSON:\n\n",
    ),
    "list": (
        "List {few} facts about {topic}.",
        "List {few} ways to",
        "Give me {few} ideas for",
        "Give me {few} tips on {topic}.",
        "What are the pros and cons of {topic}?",
        "Name {few} things that",
        "What are {few} common mistakes people make with {topic}?",
        "Create a table that compares",
        "Make a checklist for",
        "Write a packing list for",
        "Create a weekly plan for",
        "Suggest {few} titles for a book about {topic}.",
        "What are the steps to",
        "Give me {few} synonyms for",
        "Recommend",
    ),
    "fact": (
        "What is the capital of {country}?",
        "What language do people speak in {country}?",
        "Who",
        "When did",
        "Where is",
        "In what year",
        "How many",
        "How far is",
        "What is the name of",
        "True or false:",
        "Yes or no:",
        "Answer in one sentence: what is {topic}?",
        "Answer with one word:",
        "Define",
        "Which is larger,",
        "What is the currency of {country}?",
        "What colour is",
        "Choose the right answer.\n\nQuestion:",
        "What does the abbreviation",
    ),
    "write": (
        "Write a short story about {topic}.",
        "Write a short story about",
        "Write a poem about {topic}.",
        "Write a poem",
        "Write a limerick about {topic}.",
        "Write a dialogue between {role} and {role2}.",
        "Write an e-mail to",
        "Write a letter to",
        "Write a speech about {topic}.",
        "Write a product description for",
        "Write a review of",
        "Write a blog post about",
        "Write a song about",
        "Write a job advertisement for",
        "Write a news article about",
        "Write an advertisement for",
        "Continue this story: ",
        "Write a joke about {topic}.",
        "Write a tweet about {topic}.",
        "Write a scene in which {role}",
    ),
    "long": (
        "Write a detailed essay about {topic}.",
        "Write a long article about {topic} with headings.",
        "Write a step-by-step guide to",
        "Explain in detail how",
        "Give a thorough introduction to {topic}, with examples.",
        "Write a lesson plan about {topic}.",
        "Tell me everything you know about {topic}.",
        "Write a report on",
        "Compare {topic} and {topic2} in detail.",
        "Write a tutorial about",
    ),
    "advice": (
        "How can I",
        "What should I do if",
        "I feel",
        "I want to learn about {topic}. Where should I start?",
        "I have a problem with",
        "My friend",
        "What is the best way to",
        "Should I",
        "I'm planning",
        "Help me",
        "Can you help me",
        "I'm {b} years old and",
        "I need to",
    ),
    "role play": (
        "You are {role}.",
        "Pretend to be {role}.",
        "Imagine you are {role}. Describe your day.",
        "Act as {role} and",
        "Let's play a game:",
        "I want you to act as {role}. My first question is",
        "You are {role} and I am {role2}. Greet me.",
        "As {role}, what do you think about {topic}?",
        "Interview {role} about {topic}.",
    ),
    "reason": (
        "Compare {topic} and {topic2}.",
        "Do you think",
        "What would happen if",
        "Is it true that",
        "Classify the following sentence as positive, negative or neutral: ",
        "Which of these does not belong:",
        "If all",
        "Argue for and against {topic}.",
        "What can we learn from {topic}?",
        "Riddle:",
        "Find the odd one out:",
        "Sort the following words:",
        "What is the relation between {topic} and {topic2}?",
        "Name a cause and an effect of {topic}.",
        "Extract all names from this text:\n\n",
        "Who is right? {name} says",
    ),
    "dialogue": (
        "Hi",
        "Hello! ",
        "Hey, can you",
        "Good morning.",
        "I have a question about {topic}.",
        "Let's talk about {topic}.",
        "Can we talk about",
        "Thanks",
        "I just",
        "What do you know about {topic}?",
        "Who are you?",
        "Tell me",
        "Tell me a joke.",
    ),
}
WEIGHTS = {"free": 18, "code": 14, "maths": 13, "explain": 10, "dialogue": 5, "long": 5}  # the others: USUAL
USUAL = 6

FOLLOW_UPS = (
    *("",) * 12,
    "Can you",
    "Now",
    "Why",
    "What about",
    "How",
    "Thanks! ",
    "Thank you.",
    "Give me an example",
    "Give me another one.",
    "Make it shorter.",
    "Explain that in more detail.",
    "Rewrite that",
    "Translate that into {tongue}.",
    "Are you sure?",
    "What is the most important point?",
    "Summarize that in one sentence.",
    "Write it as a list.",
    "And",
    "Is there",
    "I don't understand",
    "Continue.",
    "Turn it into a poem.",
    "What does that mean?",
    "Could you also",
)

TURNS = (1, 1, 1, 1, 1, 2, 2, 2, 3, 4)
DIALOGUE_TURNS = (2, 3, 4, 5, 6)
WHOLE = re.compile(r"[.?!]$")


@dataclass(frozen=True)
class Seed:
    """What one conversation begins with, and how long it shall get. ``begun`` has one entry for each user turn."""

    kind: str
    system: str | None
    begun: tuple[str, ...]
    prompt_temperature: float
    temperatures: tuple[float, ...]  # of the answers
    noise: int  # seeds the sampling


@dataclass(frozen=True)
class Steering:
    """Where self-made prompts may go. ``systems`` None is the built-in ones and, as often, none at all."""

    seed: int = 0
    temperatures: tuple[float, ...] = (0.0,)
    prompt_temperatures: tuple[float, ...] = (1.0,)
    kinds: tuple[str, ...] = tuple(KINDS)
    topics: tuple[str, ...] = TOPICS
    systems: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise UsageError(f"There is no kind of prompt {unknown[0]!r}; choose from {', '.join(KINDS)}.")
        if not self.topics:
            raise UsageError("The list of topics is empty.")

    def at(self, number: int) -> Seed:
        """The seed of conversation ``number``: always the same one for the same steering."""
        random = Random(f"{self.seed}:{number}")
        kind = random.choices(self.kinds, [WEIGHTS.get(kind, USUAL) for kind in self.kinds])[0]
        turns = random.choice(DIALOGUE_TURNS if kind == "dialogue" else TURNS)
        words = self._words(random)
        begun = [random.choice(KINDS[kind]), *random.choices(FOLLOW_UPS, k=turns - 1)]
        return Seed(
            kind,
            self._system(random),
            tuple(text.format_map(words) for text in begun),
            random.choice(self.prompt_temperatures),
            tuple(random.choices(self.temperatures, k=turns)),
            random.getrandbits(31),
        )

    def _system(self, random: Random) -> str | None:
        if self.systems is not None:
            return random.choice(self.systems) if self.systems else None
        return random.choice(SYSTEMS) if random.random() < 0.5 else None

    def _words(self, random: Random) -> dict[str, object]:
        topics = random.sample(self.topics, 2) if len(self.topics) > 1 else self.topics * 2
        name, other = random.sample(NAMES, 2)
        role, role2 = random.sample(ROLES, 2)
        program = random.choice(PROGRAMS)
        return {
            "topic": topics[0],
            "topic2": topics[1],
            "code": random.choice(CODE),
            "program": program,
            "word": "_".join(program.lower().split()[:2]).replace("-", "_"),
            "tongue": random.choice(TONGUES),
            "country": random.choice(COUNTRIES),
            "name": name,
            "other": other,
            "things": random.choice(THINGS),
            "role": role,
            "role2": role2,
            "a": random.randint(12, 480),
            "b": random.randint(2, 12),
            "c": random.randint(2, 60),
            "few": random.choice((2, 3, 4, 5, 5, 6, 7, 8, 10)),
        }


def is_whole(begun: str) -> bool:
    """Nothing is to be added to it."""
    return bool(WHOLE.search(begun))
