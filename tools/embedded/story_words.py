"""The vocabulary of the stories: word classes, and the forms in which a template may name an entity.

A *word class* is a set of values. A *field* says which variable of an entity a slot such as `{hero.he}` stands for,
and how a value of that variable is written in the text. The generator picks values and writes them; the checker reads
the text and finds the values back. Both use the tables of this file, so they cannot disagree.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WordClass:
    """A set of values for a variable.

    Attributes:
        name: what an error message calls a value of this class.
        values: the known values.
        distinct: two variables of this class in one story must have different values.
        pattern: if set, any word that matches is a value too (an open class, such as names).
    """

    name: str
    values: tuple[str, ...]
    distinct: bool = False
    pattern: re.Pattern[str] | None = None


def _same(value: str) -> str:
    return value


@dataclass(frozen=True)
class Field:
    """How a slot is written: the variable's suffix within its role, its class, and value -> text."""

    suffix: str
    words: WordClass
    form: Callable[[str], str] = _same


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(","))


def with_article(noun: str) -> str:
    """The noun with its indefinite article: "fox" -> "a fox", "owl" -> "an owl"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capitalized(phrase: str) -> str:
    """The phrase as a sentence starts with it: "in the barn" -> "In the barn"."""
    return phrase[0].upper() + phrase[1:]


NAMES = WordClass(
    "name",
    _words(
        "Pip Wren Juniper Bramble Clover Hazel Robin Maple Rowan Sage Willow Aspen Fern Moss Birch Poppy Basil Olive "
        "River Sky Storm Sunny Pebble Biscuit Button Pepper Ginger Nutmeg Toffee Pickle Noodle Bean Kit Remy Quinn "
        "Marlow Tansy Sorrel Teasel Thistle Acorn Barley Cricket Dusty Ember Frost Jasper Koda Luka Mika Nico Onyx "
        "Pax Rue Sasha Tully Vesper Winter Yuki Zuri Oakley Finch Linden Lark"
    ),
    distinct=True,
    pattern=re.compile(r"[A-Z][a-z]*"),
)
NAME_SYLLABLES = _words(
    "ba be bo da do fa fi go ja ka ki la le lo ma mi mo na ne no pa ra ri ro sa su ta ti to va vi zo"
)

KINDS = WordClass(
    "kind of animal",
    _words(
        "fox rabbit mouse owl bear hedgehog otter badger frog squirrel duck cat dog goat turtle wolf deer mole crow "
        "beaver dragon elephant lion monkey pig sheep horse penguin raccoon hen tiger goose donkey robot bat snail"
    ),
    distinct=True,
)
TRAITS = WordClass(
    "trait",
    _words("little small young shy brave clever kind quiet cheerful curious gentle sleepy patient tiny wise funny"),
)
GENDERS = WordClass("pronoun", ("she", "he"))

THINGS = WordClass(
    "object",
    _words(
        "key lantern drum kite ball scarf bell hat ring map book basket spoon flute whistle button blanket mirror "
        "shell feather coin marble ribbon crown cup compass umbrella violin necklace cloak pencil stone star egg"
    ),
    distinct=True,
)
LOOKS = WordClass("look", _words("red blue green yellow purple white black silver golden shiny tiny pretty pink round"))

_PREPOSITIONS = {
    "in": "forest, garden, meadow, barn, cave, orchard, library, village, tower, valley, castle, kitchen, school,attic",
    "on": "hill, beach, farm, island, mountain, cliff",
    "by": "lake, sea, pond, well, waterfall, fountain, campfire",
    "near": "old mill, lighthouse, bridge, train station, windmill, oak tree, harbor, crossroads",
}
PREPOSITION_OF = {place: word for word, places in _PREPOSITIONS.items() for place in _phrases(places)}
PLACES = WordClass("place", tuple(PREPOSITION_OF), distinct=True)

INGREDIENTS = WordClass(
    "ingredient",
    _words(
        "flour milk honey butter sugar cheese cream salt cinnamon pumpkin apples berries carrots nuts plums "
        "pears lemons"
    ),
    distinct=True,
)
DISHES = WordClass("dish", _words("cake pie soup pudding stew tart casserole"))
SNACKS = WordClass("snack", _words("bread cheese cake nuts berries apples cookies grapes cherries"))
REPAIRS = WordClass("broken thing", _words("clock cart chair door wagon swing boat fence table ladder wheel roof"))
TOOLS = WordClass("tool", _words("glue string nails wire tape paint wood rope"))
OBSTACLES = WordClass("obstacle", ("river", "wall", "tunnel", "hole", "snow", "storm"))
FEARS = WordClass("fear", ("dark", "thunder", "wind", "water"))

JOB_PAST = {
    "carry the wood": "carried the wood",
    "wash the windows": "washed the windows",
    "pick the apples": "picked the apples",
    "sweep the yard": "swept the yard",
    "feed the chickens": "fed the chickens",
    "water the garden": "watered the garden",
    "clean the stove": "cleaned the stove",
    "dig up the potatoes": "dug up the potatoes",
}
JOBS = WordClass("job", tuple(JOB_PAST))
TRICK_PAST = {
    "count to ten": "counted to ten",
    "hum a little song": "hummed a little song",
    "think of warm soup": "thought of warm soup",
    "take a deep breath": "took a deep breath",
    "say a silly rhyme": "said a silly rhyme",
    "hold a friend's hand": "held a friend's hand",
}
TRICKS = WordClass("trick", tuple(TRICK_PAST))
PRICES = WordClass("price", _words("five six seven eight nine ten"))
PURSES = WordClass("purse", _words("two three four"))

_PRONOUNS = {"he": ("she", "he"), "him": ("her", "him"), "his": ("her", "his")}


def _pronoun(case: str) -> Callable[[str], str]:
    feminine, masculine = _PRONOUNS[case]
    return lambda gender: feminine if gender == "she" else masculine


def _titled(form: Callable[[str], str]) -> Callable[[str], str]:
    return lambda value: capitalized(form(value))


def _at(place: str) -> str:
    return f"{PREPOSITION_OF[place]} the {place}"


CHARACTER = {
    "": Field("name", NAMES),
    "kind": Field("kind", KINDS),
    "a_kind": Field("kind", KINDS, with_article),
    "Kind": Field("kind", KINDS, capitalized),
    "trait": Field("trait", TRAITS),
    "Trait": Field("trait", TRAITS, capitalized),
    **{case: Field("gender", GENDERS, _pronoun(case)) for case in _PRONOUNS},
    **{capitalized(case): Field("gender", GENDERS, _titled(_pronoun(case))) for case in _PRONOUNS},
}
THING = {
    "": Field("", THINGS),
    "a": Field("", THINGS, with_article),
    "A": Field("", THINGS, _titled(with_article)),
    "Title": Field("", THINGS, capitalized),
    "look": Field("look", LOOKS),
    "Look": Field("look", LOOKS, capitalized),
}
PLACE = {
    "at": Field("", PLACES, _at),
    "At": Field("", PLACES, _titled(_at)),
    "to": Field("", PLACES, lambda place: f"to the {place}"),
    "the": Field("", PLACES, lambda place: f"the {place}"),
    "Title": Field("", PLACES, str.title),
}


def _noun(words: WordClass) -> dict[str, Field]:
    return {"": Field("", words), "Title": Field("", words, capitalized)}


# The variables of a story: each role is bound once, and keeps its value to the end.
ROLES: dict[str, dict[str, Field]] = {
    "hero": CHARACTER,
    "helper": CHARACTER,
    "friend": CHARACTER,
    "elder": CHARACTER,
    "thing": THING,
    **{role: PLACE for role in ("home", "spot", "other", "goal", "way", "found")},
    **{role: _noun(INGREDIENTS) for role in ("first", "second", "third")},
    "dish": _noun(DISHES),
    "snack": _noun(SNACKS),
    "repair": _noun(REPAIRS),
    "tool": _noun(TOOLS),
    "obstacle": _noun(OBSTACLES),
    "fear": _noun(FEARS),
    "job": {"": Field("", JOBS), "past": Field("", JOBS, JOB_PAST.__getitem__)},
    "trick": {"": Field("", TRICKS), "past": Field("", TRICKS, TRICK_PAST.__getitem__)},
    "price": _noun(PRICES),
    "purse": _noun(PURSES),
}

# Words that a story need not remember: a slot `{*daytime}` is free each time.
FREE: dict[str, WordClass] = {
    "daytime": WordClass("time of day", _words("morning afternoon evening day")),
    "weather": WordClass("weather", _words("sunny rainy windy cloudy cold warm foggy snowy bright gray")),
    "season": WordClass("season", _words("spring summer autumn winter")),
    "sad": WordClass("feeling", _words("sad worried upset unhappy")),
    "glad": WordClass("feeling", _words("happy glad proud thankful")),
    "hobby": WordClass(
        "hobby",
        _phrases(
            "climb trees, count the stars, collect leaves, plant flowers, chase butterflies, watch the clouds,"
            "run in the rain, listen to the birds, skip stones, build sandcastles, look at the moon, pick berries"
        ),
    ),
    "pastime": WordClass(
        "pastime",
        _phrases(
            "sing, dance, paint, read books, tell jokes, make up songs, play hide and seek,"
            "draw pictures, learn new words"
        ),
    ),
    "trifle": WordClass(
        "trifle",
        _phrases(
            "a few old leaves, a sleepy beetle, two wet stones, an empty jar, a spider web, some dry grass,"
            "a torn newspaper, three bottle caps, a rusty nail, a lot of dust"
        ),
    ),
    "cover": WordClass(
        "hiding place",
        _phrases(
            "a pile of leaves, an old log, a big stone, a thick bush, a wooden box, some tall grass, a fallen branch,"
            "an empty barrel, a heap of hay, a wet towel"
        ),
    ),
    "occasion": WordClass(
        "occasion",
        _phrases(
            "the summer fair, the harvest feast, a big party, the village picnic, a family dinner, the school fair"
        ),
    ),
}
