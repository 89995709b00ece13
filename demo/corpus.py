#!/usr/bin/env python3
"""Generates the corpus that the demo model is trained on: chats, made from word lists and small grammars.

    python3 corpus.py sample --count 20            print chats for inspection
    python3 corpus.py heldout tasks-heldout.jsonl  write the held-out exact tasks

The seed determines everything. A hash of the content decides what is held out (see `held_out`), independently of the
seed, so that no training chat contains one of the held-out sums, word lists, words or stories, whatever its seed.
"""

import argparse
import json
import random
import re
import zlib

# ---------------------------------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------------------------------

ANIMALS = """fox bear owl rabbit mouse hedgehog squirrel badger otter beaver deer wolf cat dog kitten puppy horse pony
donkey goat sheep lamb cow pig hen rooster duck goose swan crow raven robin sparrow wren eagle parrot penguin seal whale
dolphin turtle frog toad lizard snail bee butterfly ladybug ant spider cricket monkey elephant lion tiger giraffe zebra
camel panda koala kangaroo raccoon skunk mole bat moose llama crab octopus fish hamster dinosaur peacock stork firefly
snake crocodile hippo leopard magpie weasel ferret lynx falcon pigeon bison walrus gecko""".split()
PEOPLE = """girl boy baker miller farmer sailor fisherman shepherd gardener painter tailor carpenter blacksmith teacher
knight princess prince king queen wizard witch pirate captain clockmaker musician doctor grandmother grandfather hunter
inventor librarian astronaut explorer gardener potter weaver juggler monk nurse postman scientist detective chef""".split()
CREATURES = """dragon robot giant unicorn fairy elf dwarf troll ghost mermaid goblin phoenix snowman gnome scarecrow
monster star cloud griffin""".split()
KINDS = sorted(set(ANIMALS + PEOPLE + CREATURES))

NAMES_F = """Mira Lily Rosa Nora Ella Wren Ivy Hazel Clara Daisy Luna Maya Ruby Anna Tilly Poppy Zara Flora Greta Iris
Juna Kira Lena Mona Nina Olive Pearl Saga Tara Vera Willa Yara Bella Cora Dora Elsa Freya Gilda Hanna Ida Jade Kaya Lotte
Mabel Nell Opal Petra Rhea Sally Thea Una Viola Winnie Zoe Alma Bonnie Emma Mary Sara Lucy""".split()
NAMES_M = """Rufus Oscar Milo Finn Hugo Otto Felix Theo Leo Max Toby Jasper Barnaby Pip Bruno Casper Dexter Emil Fritz
Gus Henry Igor Jonas Kurt Linus Magnus Ned Olaf Percy Quentin Rollo Silas Tom Ulf Victor Walter Yuri Zeno Arlo Boris
Cosmo Dario Edgar Floyd Gilbert Harvey Ivan Jack Kasper Lars Morris Nico Orson Pablo Ralph Sam Tobias Ben Peter Anton
""".split()

TRAITS = """brave little kind clever shy curious gentle cheerful old young tiny lonely friendly quiet lazy proud patient
silly sleepy grumpy honest happy careful bold wise small""".split()
OBJECT_LOOKS = "old golden silver red blue green small little shiny tiny magic beautiful strange painted heavy bright".split()
FRESH_LOOKS = "red golden little big round beautiful magic tiny perfect green".split()  # for food and plants
PLACE_LOOKS = "old quiet dark wide green little deep great lonely misty beautiful hidden windy sunny".split()
COLORS = "red blue green yellow white black brown purple orange pink gray golden".split()

# Objects are grouped into classes. Each class has descriptions of how such an object looks, helps and pleases.
OBJECTS = {
    "light": "lantern candle lamp torch flashlight".split(),
    "tool": "rope ladder hammer shovel saw bucket broom stick spoon fork hook net anchor axe knife sword shield".split(),
    "music": "flute drum trumpet violin guitar bell whistle harp horn fiddle accordion piano".split(),
    "treasure": "key coin crown ring pearl jewel necklace medal button gem diamond feather shell stone mirror crystal "
                "bracelet egg".split(),
    "cloth": "blanket scarf cloak hat coat quilt flag glove shawl sweater cape pillow boot".split(),
    "food": "cake pie apple cookie pumpkin loaf pear carrot sandwich cheese pancake cupcake melon".split(),
    "toy": "kite ball doll balloon puppet top marble swing".split(),
    "ride": "boat wagon cart sled raft bicycle canoe".split(),
    "paper": "map book letter painting postcard diary scroll poster".split(),
    "device": "clock compass telescope watch umbrella basket box chest jar bottle teapot wheel camera radio lock cup "
              "chair table bag pot kettle vase fan barrel crate".split(),
    "plant": "flower rose seed acorn leaf mushroom tulip".split(),
}
OBJECT_CLASS = {word: cls for cls, words in OBJECTS.items() for word in words}
STORY_ONLY = {"spaceship": "ride", "rocket": "ride", "car": "ride", "bus": "ride", "train": "ride", "pizza": "food", "muffin": "food", "paintbrush": "tool", "shoe": "cloth", "robe": "cloth"}
ALL_OBJECTS = sorted(OBJECT_CLASS)
STORY_OBJECTS = sorted(ALL_OBJECTS + list(STORY_ONLY))

LOOK = {
    "light": ["It [shone|glowed] with a [warm|soft|gentle] [light|yellow light].", "Its light was as warm as a summer evening."],
    "tool": ["It was [strong|sturdy] and [well made|useful].", "It had been made with great care."],
    "music": ["It made the [sweetest|loveliest|clearest] sound.", "Its sound was so clear that even the birds listened."],
    "treasure": ["It [glittered|sparkled|gleamed] in the [sun|light].", "It was as bright as a drop of sunlight."],
    "cloth": ["It was [soft and warm|as soft as moss].", "It had been sewn with neat little stitches."],
    "food": ["It smelled [wonderful|delicious|sweet].", "It looked good enough for a king."],
    "toy": ["It was painted in [bright|cheerful] colors.", "It was the best toy in the whole [world|land]."],
    "ride": ["It was painted [blue and white|red and green|bright yellow].", "It was small but strong."],
    "paper": ["It was full of [fine drawings|tiny drawings|strange signs].", "It was yellow with age."],
    "device": ["It was [very old|a little worn] but worked [well|perfectly].", "There were tiny stars carved into its side."],
    "plant": ["It smelled of [spring|rain|fresh earth].", "It was small and perfect."],
    "other": ["It was [unlike anything else|the finest of its kind].", "Nobody had ever seen one like it."],
}
# Sentences in which {S} finds the way with the object {x}, alone or with a companion; {they} and {them} agree with
# that.
SOLVE = {
    "light": ["{S} held up the {x}, and its light showed the way.", "{S} lit the {x}, and the shadows [drew back|fled]."],
    "tool": ["{S} used the {x} to [clear the way|push the branches aside|move the stones away].",
             "{S} worked hard with the {x} until the way was free."],
    "music": ["{S} played a [little|bright] tune on the {x}, and the sound gave {them} [courage|new hope].",
              "{S} let the {x} sound [three times|loud and clear], and the echo told {them} where to go."],
    "treasure": ["{S} held up the {x}, and it caught the light and [lit up|brightened] every corner.",
                 "{S} [turned|lifted] the {x} in the light, and a bright spot danced ahead and showed the way."],
    "cloth": ["{S} tied the {x} to a post, so that {they} could not lose the way.",
              "{S} wrapped the {x} around a sharp rock, so that {they} could [climb|pass] safely."],
    "food": ["{^they} ate a bite of the {x}, and with new strength {they} went on.", "A bite of the {x} gave {them} new strength."],
    "toy": ["{S} let the {x} go ahead, and {they} followed it [step by step|all the way].",
            "{S} played with the {x} for a moment, and at once {they} felt [braver|better]."],
    "ride": ["{S} pushed the {x} along, and it [cleared|opened] the way.", "With the {x} {they} could go [twice as fast|much farther]."],
    "paper": ["{S} studied the {x} and soon knew the way.", "{S} read the {x} aloud, and it told {them} where to go."],
    "device": ["{S} [turned|tapped] the {x} [three times|carefully], and that gave {him_S} a [good|clever] idea.",
               "{S} set the {x} down and climbed on top of it, and from there {he_S} could see [everything|far and wide]."],
    "plant": ["{S} smelled the {x} and remembered the right path.", "{S} held the {x} tightly for good luck, and it worked."],
    "other": ["{S} used the {x} to [clear the way|find the way].", "With the {x} it was [easy|not hard at all]."],
}
# Sentences in which {H} frees {F} with the object {x}.
FREE = {
    "light": ["{H} held up the {x}, and in its light {he} saw how to free {F}."],
    "tool": ["{H} pushed the {x} in like a lever and pulled with all {his} strength.", "{H} held out the {x}, and {F} took hold of it."],
    "music": ["{H} played the {x} as loudly as {he} could, and soon [all the neighbors|three strong bears] came to help."],
    "treasure": ["{H} made the {x} flash in the light, and soon somebody saw it and came to help.",
                 "{H} used the edge of the {x}, little by little, to open a way."],
    "cloth": ["{H} held out one end of the {x}, and {F} took hold of the other end."],
    "food": ["{H} gave {F} the {x} to eat, and at once {F} felt strong enough to push."],
    "toy": ["{H} showed {F} the {x} and told a joke, and {F} laughed so hard that everything shook."],
    "ride": ["{H} tied {F} to the {x} and pulled with all {his} strength."],
    "paper": ["{H} looked at the {x}, and there it was written what to do."],
    "device": ["{H} pushed the {x} in like a wedge and leaned on it with all {his} strength."],
    "plant": ["{H} tickled {F} with the {x}, and {F} sneezed so hard that everything shook."],
    "other": ["{H} used the {x} to clear the way."],
}
JOY = {
    "light": ["They hung the {x} in a tree and [danced|sang] in its light.", "They sat by the light of the {x} and told stories."],
    "tool": ["They put the {x} in a safe place, [for one never knows|ready for the next adventure]."],
    "music": ["They played the {x} and danced until [midnight|the stars came out|the moon rose]."],
    "treasure": ["They looked at the {x} together, and it [shone|sparkled] like a star."],
    "cloth": ["They shared the {x}, and it kept them warm [all night|until morning]."],
    "food": ["They ate the {x} together, [down to the last crumb|and it was delicious]."],
    "toy": ["They played with the {x} until [the sun went down|it was dark|bedtime]."],
    "ride": ["They rode home with the {x}, [laughing|singing] all the way."],
    "paper": ["They looked at the {x} together, [again and again|until they knew every line of it]."],
    "device": ["They put the {x} where everyone could see it."],
    "plant": ["They [planted|kept] the {x} [beside the door|in the garden], and it made everyone smile."],
    "other": ["They kept the {x} [in a safe place|with them always]."],
}

PLACES = {
    "water": [("river", "by"), ("lake", "by"), ("pond", "by"), ("stream", "by"), ("sea", "by"), ("beach", "on"), ("bridge", "by"),
              ("waterfall", "by"), ("harbor", "in"), ("island", "on"), ("ocean", "by"), ("swamp", "in")],
    "wood": [("forest", "in"), ("jungle", "in"), ("orchard", "in"), ("grove", "in"), ("park", "in"), ("woods", "in")],
    "field": [("meadow", "in"), ("field", "in"), ("garden", "in"), ("farm", "on"), ("valley", "in"), ("desert", "in")],
    "high": [("hill", "on"), ("mountain", "on"), ("cliff", "on"), ("volcano", "on")],
    "house": [("castle", "in"), ("barn", "in"), ("mill", "in"), ("library", "in"), ("school", "in"), ("bakery", "in"), ("house", "in"),
              ("cottage", "in"), ("lighthouse", "in"), ("tower", "in"), ("palace", "in"), ("museum", "in"), ("workshop", "in"),
              ("temple", "in"), ("kitchen", "in"), ("shop", "in"), ("treehouse", "in"), ("windmill", "in"), ("theater", "in")],
    "town": [("village", "in"), ("market", "at"), ("town", "in"), ("city", "in"), ("circus", "at"), ("zoo", "at")],
    "dark": [("cave", "in"), ("tunnel", "in"), ("cellar", "in"), ("mine", "in"), ("attic", "in"), ("maze", "in")],
    "sky": [("moon", "on"), ("planet", "on")],
}
PLACE_INFO = {word: (cls, prep) for cls, words in PLACES.items() for word, prep in words}
ALL_PLACES = sorted(PLACE_INFO)
ONLY_THE = {"moon", "sea", "woods", "ocean"}

SCENE = {
    "water": ["The water [sparkled|glittered] in the [sun|morning light].", "Small waves whispered [against|over] the stones.",
              "The water was [clear|calm] and [cool|cold]."],
    "wood": ["The [tall|old] trees [whispered|swayed] in the wind.", "Sunlight fell through the leaves in golden [spots|drops].",
             "It smelled of [moss|pine|wet leaves]."],
    "field": ["The [grass|air] was warm and [full of crickets|full of bees].", "The wind moved softly over the [ground|earth].",
              "Everything was [still|peaceful] under the wide sky."],
    "high": ["From up there, one could see the whole [world|land].", "The wind [blew|sang] around the rocks.", "The path was steep and [stony|narrow]."],
    "house": ["[Dust|Sunlight] danced in front of the windows.", "The floor creaked at every step.", "It was [quiet|cool and quiet] inside."],
    "town": ["There were [people|colors] and [music|voices] everywhere.", "The streets were [busy|full of life].",
             "It smelled of fresh bread and [flowers|oranges]."],
    "dark": ["It was so dark that one could hardly see a thing.", "Somewhere water dripped, [drip|plip], [drop|plop].",
             "Every sound [came back as an echo|echoed]."],
    "sky": ["Everything was silver and [silent|still].", "The stars were so close that one could almost touch them."],
    "other": ["It was a [strange|wonderful|quiet] place.", "Nobody else was [there|to be seen]."],
}
STUCK = {
    "water": ["was trapped behind a pile of driftwood", "was stuck in the [deep mud|thick reeds]"],
    "wood": ["was caught in a thorn bush", "was trapped under a fallen branch"],
    "field": ["was caught in an old fence", "was stuck in a deep ditch"],
    "high": ["was trapped behind a heap of fallen rocks", "was stuck on a narrow ledge"],
    "house": ["was locked in a small room", "was trapped behind a fallen shelf"],
    "town": ["was stuck behind a heap of boxes", "was locked in an empty shed"],
    "dark": ["was lost in the dark", "was trapped behind a heap of stones"],
    "sky": ["was stuck in a deep crater", "was trapped behind a silver rock"],
    "other": ["was stuck and could not get free", "was trapped and could not get out"],
}
HIDE = {
    "water": ["under a flat stone", "between the reeds", "behind a piece of driftwood"],
    "wood": ["between two roots", "under a heap of leaves", "inside a hollow tree"],
    "field": ["in the tall grass", "under a thorn bush", "beside an old fence"],
    "high": ["behind a big rock", "on a narrow ledge", "between two stones"],
    "house": ["under the stairs", "behind the door", "in a dusty corner"],
    "town": ["under a bench", "behind the fountain", "beside an empty cart"],
    "dark": ["in a crack in the wall", "behind a pile of stones", "in the farthest corner"],
    "sky": ["at the edge of a crater", "behind a silver rock"],
    "other": ["under a stone", "in a quiet corner"],
}

FOODS = """plum cake|hot soup|honey bread|apple pie|warm milk and cookies|cheese and bread|berry jam|pancakes|roasted nuts|
mushroom stew|fresh bread|sweet tea|carrot soup|blueberry muffins|vegetable stew|cherry pie|popcorn|strawberries|
noodles|baked potatoes""".replace("\n", "").split("|")
HOBBIES = """to sing|to explore|old stories|rainy days|to paint|to dance|long walks|to count the stars|to collect stones|
to read|to cook|to whistle|the smell of rain|to climb trees|to tell jokes|to watch the clouds|puzzles|to plant flowers|
to build things|quiet evenings|to take naps|to listen to the wind|riddles|to make new friends""".replace("\n", "").split("|")
MORALS = {
    "friendship": ["a good friend is the greatest treasure", "everything is easier with a friend", "friends make the heart light"],
    "kindness": ["a kind heart finds friends everywhere", "kindness always comes back", "a small kindness can change a whole day"],
    "courage": ["being brave does not mean having no fear", "courage grows with every step", "even the small can be brave"],
    "sharing": ["joy grows when it is shared", "sharing makes everything better", "a shared treasure shines twice as bright"],
    "patience": ["good things take time", "patience opens many doors", "one step at a time is enough"],
    "helping others": ["helping others makes everyone happy", "it is good to ask for help", "together one can do anything"],
    "honesty": ["the truth is always the best way", "an honest heart has nothing to fear"],
}
THEMES = sorted(MORALS)
SEASONS = "spring summer autumn winter".split()
EXTRA_WORDS = """above after again air always angel animal answer apple april arm arrow august autumn baby back banana basket
beach bean bed begin berry best bird birthday black blanket blue board body bone bread breakfast bridge bright bring brother
brush build bus candy car castle center chain chalk cherry child circle circus class clean climb cloud coast coffee cold
color corn corner country cousin crayon cream cross curtain dance danger daughter day dear december desk dinner dirt door
dream dress drink drive dust ear early earth east eat eight evening eye face fall family farm father february feet fence
field fight finger fire first five flight floor food foot forest four friday friend fruit funny future game garden gate
gift glass gold good grain grape grass green ground grow guess hair half hall hand happy hard head heart heavy help hero
hill holiday home honey hope hour hundred ice idea ink island jacket january job joke jolly journey juice july june jump
jungle kick kind kiss kitchen knee knock ladder lake language laugh lemon lesson life light line lip listen lunch machine
magic march market matter may meal meat medicine middle milk million minute mirror moment monday money month morning mother
mountain mouth move movie music nail name nature neck needle neighbor nest never new nice night nine noise nose november
number ocean october office oil onion open orange orchard order oven page paint palm pants paper parent party path peace
peach pencil pepper person pet picture pillow pilot pink pirate plane planet plant plate player pocket pond potato powder
present price print prize problem promise pudding purple puzzle question quick quiet race rain rainbow reason ribbon rice
river road rock roof room root rope round rubber rule salad salt sand saturday sauce school science sea season second
secret september seven shadow shape sheet shelf shirt shoe shop shoulder silence silver sister six skate skin sky sleep
smile smoke snow soap sock soft song sound soup south space spoon spring square stairs station steam stem step storm story
stove straw street string strong student sugar summer sun sunday surprise sweet table tail talk taste teacher ten tent
test thank thief thing thought thousand thread three thunder thursday ticket tiger time toast today toe tomato tomorrow
tongue tooth town toy trade travel treasure tree trick trip truck tuesday turn twelve twenty two uncle under valley
vegetable view village visit voice wait walk wall warm wash water wave weather wednesday week west wheat wheel white
whisper wind window wing winter wish wolf wonder wood wool word work world yard year yellow yesterday zero jelly keeper
velvet vanilla violet walnut wander whale yawn yogurt zipper quarter quilt quarrel rocket rabbit saddle sailor sandal
temple tender tunnel turnip umbrella unicorn useful vacuum valentine victory volcano voyage computer keyboard elephant
hospital hamburger helicopter butterfly chocolate crocodile dinosaur telephone television spaghetti strawberry sunflower
pineapple watermelon mushroom kangaroo dangerous different favorite important beautiful adventure astronaut alligator
avocado balloon bamboo blossom bottle bubble butter button cactus camera candle canyon carpet castle cattle cellar
chapter charm cheese chimney cinnamon clever clover cobweb coconut cotton cricket crystal dolphin donkey dragon eagle
elbow emerald engine fabric feather ferry flame flute fountain galaxy garlic ginger glacier glitter hammer harvest
hazelnut horizon insect ivory jasmine jigsaw kettle kingdom lantern lavender leather legend library lizard magnet
marble meadow melody mermaid mineral mitten mystery napkin nectar nutmeg octopus opera oyster paddle palace parade
parsley pebble pelican penguin petal pigeon pirate plaster pottery pumpkin raisin raspberry recipe riddle saffron
sapphire scissors shadow shepherd shovel sparkle squirrel statue sunset sunrise swallow tangerine thimble thistle
timber trumpet tulip turtle twilight vessel village vinegar waffle wagon whistle willow wizard wreath zebra""".split()


def all_words():
    """Returns all real words that the word tasks may use, in lower case."""
    words = set(KINDS + ALL_OBJECTS + ALL_PLACES + TRAITS + OBJECT_LOOKS + FRESH_LOOKS + PLACE_LOOKS + COLORS + SEASONS + EXTRA_WORDS)
    return sorted(word for word in words if 3 <= len(word) <= 10)


WORDS = all_words()


def held_out(key, percent):
    """Returns whether this content is held out. A hash decides, so that it does not depend on a seed."""
    return zlib.crc32(("ostinato:" + key).encode()) % 1000 < percent * 10


# ---------------------------------------------------------------------------------------------------------------------
# A small grammar: [one|of|these], {slot}, {^slot} with a capital, {@macro}, {+fact} notes that a fact was told.
# ---------------------------------------------------------------------------------------------------------------------

def number(text):
    """Returns a number that depends only on the text."""
    return zlib.crc32(text.encode())


def lean(rng, count, point, leaning, chance=0.35):
    """Returns one of `count` choices. With probability `chance` it is the choice that `leaning` prefers at this point
    of the grammar, otherwise a uniform one.

    A story's leaning depends on its hero, so that the most likely story about an owl differs from that about a fox."""
    if leaning and rng.random() < chance:
        return (((point ^ leaning) * 0x9E3779B1 & 0xFFFFFFFF) >> 15) % count
    return int(rng.random() * count)


def favorite(rng, options, point, leaning):
    """Returns one of the options; the leaning prefers three of them."""
    pick = rng.random()
    if pick < 0.38:
        return options[lean(rng, len(options), number(point) + (0 if pick < 0.18 else 1 if pick < 0.30 else 2), leaning, 1)]
    return rng.choice(options)


def parse(text):
    """Parses a template into nested lists and tuples."""
    pos = 0

    def sequence(stop):
        nonlocal pos
        parts, literal = [], ""
        while pos < len(text) and text[pos] not in stop:
            char = text[pos]
            if char in "[{":
                if literal:
                    parts.append(literal)
                    literal = ""
                pos += 1
                if char == "{":
                    end = text.index("}", pos)
                    parts.append(("slot", text[pos:end]))
                    pos = end + 1
                else:
                    options = [sequence("|]")]
                    while text[pos] == "|":
                        pos += 1
                        options.append(sequence("|]"))
                    assert text[pos] == "]", text
                    pos += 1
                    parts.append(("any", options, number(f"{text}:{pos}")))
            else:
                literal += char
                pos += 1
        if literal:
            parts.append(literal)
        return parts

    parts = sequence("")
    return parts


PARSED = {}


def expand(rng, template, slots, told=None, leaning=0):
    """Expands a template (a string, or a list from which one is chosen) with the given slots."""
    if isinstance(template, list):
        template = template[lean(rng, len(template), len(template[0]), leaning)]
    tree = PARSED.get(template)
    if tree is None:
        tree = PARSED[template] = parse(template)
    out = []

    def walk(parts):
        for part in parts:
            if type(part) is str:
                out.append(part)
            elif part[0] == "any":
                options = part[1]
                walk(options[lean(rng, len(options), part[2], leaning)])
            else:
                name = part[1]
                first = name[0]
                if first == "@":
                    out.append(expand(rng, MACROS[name[1:]], slots, told, leaning))
                elif first == "+":
                    told.add(name[1:])
                elif first == "^":
                    value = slots[name[1:]]
                    out.append(value[:1].upper() + value[1:])
                else:
                    out.append(slots[name])

    walk(tree)
    return "".join(out)


def a(phrase):
    """Returns the phrase with its indefinite article ('the' for words of ONLY_THE)."""
    if phrase in ONLY_THE:
        return "the " + phrase
    return ("an " if (phrase[0] in "aeiou" or phrase.startswith("hon")) and not phrase.startswith(("uni", "use", "ukul")) else "a ") + phrase


def tidy(text):
    """Returns the text with single spaces between sentences and none at the ends."""
    return re.sub(r" {2,}", " ", text).strip()


ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sn sp st t th tr v w z".split()
VOWELS = "a e i o u ai ea ee oo ou a e i o u".split()
CODAS = ["", "", "", "b", "ck", "d", "g", "l", "ll", "m", "n", "nd", "ng", "nt", "p", "r", "rn", "s", "st", "t", "x"]


def invented(rng, syllables=None):
    """Returns an invented word, such as 'snorbel'."""
    count = syllables or rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))[:11]


# ---------------------------------------------------------------------------------------------------------------------
# Stories
# ---------------------------------------------------------------------------------------------------------------------

MACROS = {
    "open": [
        "[Once upon a time|Long ago|Many years ago], {ah} [named|called] {H} lived {inP2}.",
        "There was once {ah} [named|called] {H}, who lived {inP2}.",
        "{H} was {ah} who lived {inP2}.",
        "{^inP2}, there lived {ah} [named|called] {H}.",
        "Once there [was|lived] {ah} named {H}. {^he} [lived|had {his} home] {inP2}.",
    ],
    "hobby": ["{^he} loved {hobby}{+hobby}.", "{H} loved {hobby}{+hobby}.", "", "", ""],
    "day": ["One [morning|day|afternoon|evening]", "One {season} [morning|day|afternoon|evening]", "One [rainy|sunny|windy|foggy|cold|warm] [morning|day|afternoon]",
            "Early one morning", "On a [quiet|bright|gray] {season} day"],
    "then": ["[At last|Before long|After a while|Soon|Finally]"],
    "sad": ["{H} was very [sad|worried|unhappy].", "{H} sat down and [sighed|cried].", "{H} did not know what to do.", "{H} felt a lump in {his} throat."],
    "glad": ["{H} was so [happy|glad] that {he} [jumped|laughed|danced].", "{H} [beamed|smiled from ear to ear|laughed with joy].",
             "{H} could hardly believe {his} luck.", "What a [joy|relief] that was!"],
    "thanks": ['"[Thank you|Thank you so much|How kind of you], {F}!" [said|cried] {H}.', '"I will never forget this," said {H}.',
               '"You are a true friend, {F}," said {H}.', '"How can I ever thank you, {F}?" asked {H}.'],
    "fthanks": ['"[Thank you|Thank you so much|How kind of you], {H}!" [said|cried] {F}.', '"I will never forget this," said {F}.',
                '"You are a true friend, {H}," said {F}.', '"How can I ever thank you, {H}?" asked {F}.'],
    "eat": ["That [evening|night], {H} and {F} shared {food}{+food}.", "Then {H} and {F} sat down together and ate {food}{+food}.",
            "To celebrate, {H} and {F} had {food}{+food}.", "", ""],
    "end": ["From that day on, {H} and {F} were [the best of friends|always together|never lonely again].",
            "And so {H} and {F} became [good|close|dear] friends.", "{H} [fell asleep|went to bed] with a smile that night.",
            "And {H} was happy for a long, long time.",
            "And if you ever pass [by the {p2}|the {p2}], you may hear {H} and {F} laughing.",
            "They still [talk|laugh] about it today." ],
    "moral": ["{H} had learned that {moral}{+moral}.", "That day {H} learned that {moral}{+moral}."],
    "third": ["On the way they met {at} named {T}{+third}. [\"Keep going,\" said {T}. \"You are [close|nearly there]!\"|{T} wished them good luck.|"
              "\"I will keep my fingers crossed for you,\" said {T}.]",
              "{^at} named {T} [waved to them|watched them] as they passed{+third}. \"[Good luck|Be careful]!\" called {T}.",
              "{^at} named {T} showed them the [shortest|safest] path{+third}."],
}

# Each plot has a text and questions with answers. A question about a fact that the text tells only sometimes has a
# third part, which names the {+fact} that must have been told.
PLOTS = {
    "lost": ("""{@open} {@hobby} {^his} [dearest|greatest|most precious] treasure was {ao}. {look_o} {@day}, {H} [took a walk|went for a walk|walked] {toP}.
 {scene} But when {he} [came home|got home], the {o} was gone. "Oh no!" [cried|said] {H}. "I have lost my {o} {inp}!" {@sad}
 [{^af} named {F} heard {him} and [came over|stopped].|Just then, {af} named {F} came by.] "Do not [worry|cry|be sad]," said {F}. "I have {ao2}. [It will help us.|We will look together.]"
 [So they|Together they] went back {top}. {THIRD} {solve_o2_F} {@then}, {W} [saw|found|spotted] the {o} {hide}. {@glad} {@thanks} {@eat} {JOY_o} {@MORAL} {@end}""",
        [("Who lost the {o}?", "{H} lost the {o}."), ("What did {H} lose?", "{H} lost the {o}."),
         ("Where did {H} lose the {o}?", "{H} lost the {o} {inp}."), ("Who found the {o}?", "{W} found the {o}."),
         ("Where was the {o}?", "The {o} was {hide}."), ("Who helped {H}?", "{F} the {f} helped {H}."),
         ("What did {F} have?", "{F} had {ao2w}.")]),
    "found": ("""{@open} {@hobby} {@day}, {H} was {inP}. {scene} [There|Suddenly], {hide}, {he} found {ao}. {look_o}
 "[Who may have lost this|Whose {o} is this|Who does this belong to]?" [wondered|asked] {H}. {^he} [could have kept it, but that did not feel right|wanted to keep it, but {he} knew it was not {hisown}].
 So {H} [set out|went] to find the owner. {THIRDH} {^he} asked [everyone {he} met|at every door|here and there], until {he} [met|came to] {af} named {F}, who looked very sad.
 "I have lost my {o}," [said|sighed] {F}. "Is it this one?" asked {H}, and held it up. {F} [jumped for joy|could hardly believe it|laughed and cried at once].
 {@fthanks} [As a reward|To say thank you|In return], {F} gave {H} {ao2}. {look_o2} {@eat} {JOY_o} {@MORAL} {@end}""",
        [("Who found the {o}?", "{H} found the {o}."), ("Where did {H} find the {o}?", "{H} found the {o} {inp}."),
         ("What did {H} find?", "{H} found {aow}."), ("Who lost the {o}?", "{F} lost the {o}."), ("Whose {o} was it?", "The {o} belonged to {F}."),
         ("What did {F} give {H}?", "{F} gave {H} {ao2w}."), ("Who gave {H} the {o2}?", "{F} gave {H} the {o2}.")]),
    "broken": ("""{@open} {@hobby} {H} had {ao}, and {he} [took it everywhere|was very proud of it|looked after it every day]. {look_o}
 {@day}, the {o} [fell down and broke|slipped and broke|broke in two]. "[Oh dear|Oh no]!" [said|cried] {H}. "What shall I do now?" {@sad}
 [A neighbor said|Somebody told {him}] that {af} named {F} could [mend|repair] anything. {F} lived {inP}, and that was a long way. Still, {H} [packed the {o}|put the {o} in a bag] and [went|set out].
 {THIRDH} {scene} {F} looked at the {o} [for a long time|from all sides]. "[I can mend it|It is not so bad]," said {F}, "but I need {ao2}." {H} [searched|looked] [everywhere|all around], and {hide} {he} found {ao2w}.
 [All day long|For an hour|Until evening] they worked together. {@then}, the {o} was [as good as new|better than before]. {@glad} {@thanks} {@eat} {JOY_o} {@MORAL} {@end}""",
        [("What broke?", "The {o} broke."), ("Who mended the {o}?", "{F} mended the {o}."), ("Where did {F} live?", "{F} lived {inp}."),
         ("What did {F} need?", "{F} needed {ao2w}."), ("Who found the {o2}?", "{H} found the {o2}."), ("Where was the {o2}?", "The {o2} was {hide}."),
         ("Whose {o} was it?", "The {o} belonged to {H}.")]),
    "rescue": ("""{@open} {@hobby} {@day}, {H} was on the way home with {ao} and {ao2}. [As {he} passed {the_p}|When {he} came {toP}], {he} heard a [faint|small] voice. "Help! Help!" it [called|cried].
 {scene} {H} [ran|hurried] [closer|to see what was wrong]. There {he} saw {af} named {F}, who {stuck}. "[Do not be afraid|Hold on|Stay calm]," [said|called] {H}. "I will [help you|get you out]!" {THIRDH}
 First {H} [tried it with|used] the {o2}, but it was [not enough|no use]. Then {he} [had an idea|thought of the {o}]. {FREE} [One, two, three|A little more, and a little more], and {F} was free!
 {@fthanks} "[Anyone would have done the same|That is what friends are for]," said {H}[, a little shy|]. {@eat} {JOY_o} {@MORAL} {@end}""",
        [("Who was in trouble?", "{F} the {f} was in trouble."), ("Who called for help?", "{F} called for help."), ("Who saved {F}?", "{H} saved {F}."),
         ("Where was {F}?", "{F} was {inp}."), ("What did {H} use first?", "{H} used the {o2} first."), ("What was no use?", "The {o2} was no use.")]),
    "race": ("""{@open} {@hobby} [Every year|Each {season}] there was a [great|big] race {inP}, and the prize was {ao}. {look_o} {H} wanted to win it [more than anything|with all {his} heart].
 [The fastest runner|The favorite] was {af} named {F}. "[I will win, you will see|Nobody can beat me]," [said|laughed] {F}. [Ready, steady, go!|The race began.] {scene} {F} was far ahead, and {H} ran as fast as {he} could. {THIRDRACE}
 But [halfway|near the end] {F} tripped over {ao2} and [fell|could not get up]. {H} [could have run past|could have won now]. But {he} stopped. "[Come on|Take my hand|Lean on me]," said {H}. "We will [finish|do it] together."
 And side by side they [crossed|reached] the finish line. [Everyone cheered|The crowd cheered|Everybody clapped]. "[You should have the prize|You are the real winner], {H}," said {F}, and gave {him} the {o}. {@glad} {@eat} {JOY_o} {@MORAL} {@end}""",
        [("What was the prize?", "The prize was {aow}."), ("Where was the race?", "The race was {inp}."), ("Who fell?", "{F} fell."), ("Who tripped?", "{F} tripped."),
         ("What did {F} trip over?", "{F} tripped over {ao2w}."), ("Who stopped to help {F}?", "{H} stopped to help {F}."), ("Who got the {o}?", "{H} got the {o}.")]),
    "fear": ("""{@open} {@hobby} There was only one thing that {H} [feared|was afraid of]: the {P}. "[It is too big for me|I do not dare to go there]," {he} [always said|used to say]. {scene}
 {@day}, {F}, {af} from next door, [came running|knocked at the door]. "[Please help me|I need your help], {H}!" said {F}. "I left my {o2} {inp}, and I cannot [get it|fetch it] alone." {H} [swallowed|trembled a little]. Then {he} [took|picked up] {ao}. "[With this I can do it|This will give me courage]," {he} said.
 [So they|Together they] went {top}. {THIRD} {^his} heart was beating fast. {solve_o_H} And look, it was not so bad at all! The {o2} was {hide}. {@fthanks} "[It was easy|I am not afraid any more]," [said|laughed] {H}. {@eat} {JOY_o2} {@MORAL} {@end}""",
        [("What was {H} afraid of?", "{H} was afraid of the {p}."), ("Who was afraid?", "{H} was afraid."), ("Who asked for help?", "{F} asked for help."),
         ("What did {F} leave behind?", "{F} left the {o2} behind."), ("What did {H} take along?", "{H} took along {aow}."), ("Where was the {o2}?", "The {o2} was {hide}."),
         ("Whose {o2} was it?", "The {o2} belonged to {F}.")]),
    "noise": ("""{@open} {@hobby} {@day}, {H} heard a strange noise. It came from the {P}. [Knock, knock, knock!|Tap, tap, tap!|Boom, boom, boom!|Swish, swish, swish!] "What can that be?" [whispered|wondered] {H}.
 {^he} [took|picked up] {ao} and [set out|crept closer] to [find out|have a look]. {scene} {THIRDH} {solve_o_H} The noise [grew|became] louder and louder. {H} [held {his} breath|was a little scared|almost turned back].
 But there {he} saw [only|nobody but] {af} named {F}, who was [busy with|working on|playing with] {ao2}. "[Did I scare you|Was I too loud]?" asked {F}. "I am [very|so] sorry." "[A little|Just a little bit]," [said|laughed] {H}. "May I [help|join in]?"
 "[Of course|Gladly|Yes, please]!" said {F}. And so they [spent the whole day together|worked and laughed until evening]. {@eat} {JOY_o2} {@MORAL} {@end}""",
        [("What did {H} hear?", "{H} heard a strange noise."), ("Who made the noise?", "{F} the {f} made the noise."), ("Where did the noise come from?", "The noise came from the {p}."),
         ("Who heard a noise?", "{H} heard a noise."), ("What did {H} take along?", "{H} took along {aow}."), ("What was {F} busy with?", "{F} was busy with {ao2w}.")]),
    "storm": ("""{@open} {@hobby} {@day}, dark clouds came up, and a [great|terrible|wild] storm began. The wind howled and the rain [fell in sheets|beat down on the roofs]. {H} [lit a fire|closed the door] and was glad to be at home.
 Then {he} remembered {F}, {af} who was still out {inP}. "{F} [will be wet and cold|may be in danger]," {he} said. "I must go!" {H} took {ao} and [ran|went] out into the storm. {THIRDH} {scene} {H} called, but the wind was louder. {solve_o_H}
 {@then}, {he} found {F} {hide}, [shivering|trembling] and holding {ao2}. "[I knew you would come|You came for me]!" [cried|said] {F}. [Hand in hand|Side by side] they [walked|hurried] home. {@eat} {@fthanks} {JOY_o2} The next morning, the sun was shining again. {@MORAL} {@end}""",
        [("Who was out in the storm?", "{F} was out in the storm."), ("Where was {F}?", "{F} was {inp}."), ("Who found {F}?", "{H} found {F}."),
         ("What did {H} take along?", "{H} took along {aow}."), ("What was {F} holding?", "{F} was holding {ao2w}.")]),
    "gift": ("""{@open} {@hobby} {H} had a good friend, {af} named {F}. It was nearly {F}'s birthday, and {H} [still had no gift|did not have a gift yet]. "What would [make {F} happy|{F} like]?" {he} [wondered|thought].
 {@day}, {H} went {toP} to look for something. {scene} {THIRDH} [For a long time there was nothing|At first there was nothing]. But then {he} saw {ao} {hide}. {look_o} "[That is perfect|That is just right]!" [said|cried] {H}, and [cleaned it carefully|wrapped it in leaves|tied a ribbon around it].
 When the birthday came, {F} [opened|unwrapped] the gift. "[The most beautiful {o} in the world|Just the {o} I have always wanted]!" [cried|said] {F}. "And look, I have {ao2} for you, because you are my friend." {look_o2} {@glad} {@eat} {JOY_o} {@MORAL} {@end}""",
        [("Whose birthday was it?", "It was {F}'s birthday."), ("Who had a birthday?", "{F} the {f} had a birthday."), ("What did {H} give {F}?", "{H} gave {F} {aow}."),
         ("Where did {H} find the {o}?", "{H} found the {o} {inp}."), ("What did {F} give {H}?", "{F} gave {H} {ao2w}."), ("Who found the {o}?", "{H} found the {o}.")]),
    "treasure": ("""{@open} {@hobby} {@day}, {H} found an old map in a [bottle|drawer|hollow log]. A red cross marked a spot {inP}. "A treasure!" [cried|whispered] {H}, and {he} [ran|hurried] to {his} friend {F}, {af}. "[Will you come with me|Shall we look for it together]?"
 "[Of course|Gladly]," said {F}. "I will bring my {o2}." And off they went. {THIRD} {scene} [The way was long|It was a long way], but they did not give up. {solve_o2_F} [They counted ten steps|They followed the map], and there, {hide}, they [began to dig|stopped and searched].
 {@then}, they found {ao}. {look_o} It was not gold, but {H} and {F} [did not mind|were happy all the same]. "[We found it together|It belongs to both of us]," said {W}. {@eat} {JOY_o} {@MORAL} {@end}""",
        [("What did {H} find first?", "{H} found an old map."), ("Who found the map?", "{H} found the map."), ("What was the treasure?", "The treasure was {aow}."),
         ("Where was the treasure?", "The treasure was {inp}."), ("What did {F} bring?", "{F} brought {ao2w}."), ("Who came with {H}?", "{F} the {f} came with {H}.")]),
    "quarrel": ("""{@open} {@hobby} {^his} [neighbor|best friend] was {af} named {F}. {@day}, {H} and {F} found {ao} {inP}. {look_o} "[It is mine|I saw it first]!" said {H}. "[No, it is mine|No, I saw it first]!" said {F}. [They pulled and pulled|They shouted at each other|Neither would let go],
 and then the {o} [slipped away|flew through the air] and [was gone|disappeared]. [Now nobody had it|Both were silent]. {scene} "[I am sorry|It was my fault]," said {W} [at last|in a small voice]. "[I am sorry too|Let us look for it together]," said {V}. {THIRD}
 {V} [fetched|brought] {ao2}. {solve_o2_V} And {hide}, there it was! {@glad_both} "[We can share it|It can belong to both of us]," said {W}. {@eat} {JOY_o} {@MORAL} {@end}""",
        [("What did {H} and {F} find?", "{H} and {F} found {aow}."), ("Where did they find the {o}?", "They found the {o} {inp}."), ("Who said sorry first?", "{W} said sorry first."),
         ("What did {V} bring?", "{V} brought {ao2w}."), ("Who brought the {o2}?", "{V} brought the {o2}."), ("Where was the {o} in the end?", "The {o} was {hide}.")]),
    "trade": ("""{@open} {@hobby} {H} had {ao2}, but what {he} [really wanted|wished for most] was {ao}. {@day}, {he} went {toP}. {scene} There {he} met {af} named {F}, who had [just such|exactly such] {aow}. {look_o}
 "[Would you trade your {o} for my {o2}|Will you give me your {o} for my {o2}]?" asked {H}. {F} [thought about it|scratched {fhis} head]. "[My {o} was a gift from my grandmother|I am very fond of my {o}]," said {F}, "but [we could share|you may use it whenever you like]." {THIRDH}
 So {H} brought the {o2} and {F} brought the {o}, and [every day|each afternoon] they met {inp}. {@glad} "[Two things are twice the fun|This is much better than a trade]," said {W}. {@eat} {JOY_o} {@MORAL} {@end}""",
        [("What did {H} want?", "{H} wanted {aow}."), ("What did {H} have?", "{H} had {ao2w}."), ("Who had the {o}?", "{F} the {f} had the {o}."), ("Where did {H} meet {F}?", "{H} met {F} {inp}."),
         ("Who wanted the {o}?", "{H} wanted the {o}.")]),
    "new": ("""{@open} {@hobby} {@day}, {af} named {F} came to live {inP}. {F} had only {ao2} and [knew nobody|no friends at all]. {H} saw {F} sitting all alone. {scene} "[Somebody should say hello|I will say hello]," thought {H}, but {he} was a little shy.
 So {he} took {ao} as a gift and went {top}. {THIRDH} {look_o} "[Welcome|Hello]!" said {H}. "My name is {H}. This {o} is for you." {F} [blushed|smiled for the first time]. "[Nobody has ever given me a gift|That is the nicest gift of all]," said {F}. "[May I show you my {o2}|Would you like to see my {o2}]?"
 {look_o2} They talked and laughed until [the moon rose|it grew dark]. {@eat} {JOY_o} {@MORAL} {@end}""",
        [("Who was new?", "{F} the {f} was new."), ("What did {H} give {F}?", "{H} gave {F} {aow}."), ("Who gave {F} the {o}?", "{H} gave {F} the {o}."), ("Where did {F} come to live?", "{F} came to live {inp}."),
         ("What did {F} have?", "{F} had {ao2w}."), ("Who was shy?", "{H} was shy.")]),
}
PLOT_NAMES = sorted(PLOTS)
ANY_PLACE = set(PLACES) | {"other"}
PLOT_PLACES = {"storm": {"water", "wood", "field", "high"}, "race": {"water", "wood", "field", "high", "town"}}
PLOT_THEMES = {
    "lost": ["friendship", "kindness", "helping others", "patience"], "found": ["honesty", "kindness"], "broken": ["patience", "helping others", "friendship"],
    "rescue": ["helping others", "courage", "kindness"], "race": ["helping others", "kindness", "friendship"], "fear": ["courage", "friendship"],
    "noise": ["courage", "friendship"], "storm": ["courage", "friendship", "helping others"], "gift": ["friendship", "kindness", "patience"],
    "treasure": ["friendship", "sharing", "patience"], "quarrel": ["sharing", "friendship"], "trade": ["sharing", "friendship"], "new": ["kindness", "friendship", "courage"],
}

MACROS["third_race"] = ["{^at} named {T} [clapped|cheered] for both of them{+third}.", "\"[Go on|Faster]!\" called {T}, {at} who stood by the path{+third}."]
MACROS["glad_both"] = ["[They hugged each other|They laughed with relief|How glad they were]."]
MACROS["MORAL"] = ["{@moral}", "{@moral}", ""]
MACROS["MORAL_ALWAYS"] = MACROS["moral"]
MACROS["third_one"] = [text.replace("they", "{he}").replace("them", "{him}") for text in MACROS["third"]]

COMMON_QUESTIONS = [
    ("What was the {h}'s name?", "The {h}'s name was {H}.", None), ("What was the name of the {h}?", "The {h}'s name was {H}.", None),
    ("What was the {f}'s name?", "The {f}'s name was {F}.", None), ("What was the name of the {f}?", "The {f}'s name was {F}.", None),
    ("Who was {H}?", "{H} was {ahw}.", None), ("Who was {F}?", "{F} was {afw}.", None),
    ("Where did {H} live?", "{H} lived {inp2}.", None),
    ("What did {H} love?", "{H} loved {hobby}.", "hobby"), ("What did {H} and {F} eat?", "{H} and {F} ate {food}.", "food"),
    ("What did they eat?", "They ate {food}.", "food"), ("What did {H} learn?", "{H} learned that {moral}.", "moral"),
    ("Who was {T}?", "{T} was {atw}.", "third"), ("What was the name of the {t}?", "The {t}'s name was {T}.", "third"),
]
NOT_TOLD = "The story does not say."


HOMES = {
    **{kind: ["field", "house", "town"] for kind in PEOPLE + ["dog", "cat", "kitten", "puppy", "horse", "pony", "donkey", "goat", "sheep", "lamb", "cow", "pig", "hen", "rooster", "scarecrow", "robot"]},
    **{kind: ["water"] for kind in "otter beaver duck swan seal whale dolphin turtle frog toad crab octopus fish hippo crocodile walrus penguin goose mermaid sailor fisherman pirate".split()},
    **{kind: ["dark", "high"] for kind in "mole bat dragon dwarf goblin troll ghost eagle falcon giant monster griffin phoenix gnome".split()},
    **{kind: ["sky"] for kind in ["star"]},
}


def home(rng, kind, leaning):
    """Returns the place where such a hero lives: usually one that fits the kind, and often one of three preferred
    places."""
    if rng.random() < 0.15:
        return rng.choice(ALL_PLACES)
    classes = HOMES.get(kind, ["wood", "field", "wood", "high"])
    fitting = [word for cls in classes for word, _ in PLACES[cls]]
    return favorite(rng, fitting, "home", leaning)


class Story:
    """A story: its text, the things that a request for it may name, and questions about it."""

    def __init__(self, rng, theme=None, want_third=False):
        slots = {}
        # What the request may leave open is chosen with a preference that depends on what the request names, so that
        # the most likely stories differ as well.
        objects = rng.sample(STORY_OBJECTS, 2)
        kinds = [favorite(rng, KINDS, "kind", number(objects[0]))]
        kinds.append(favorite(rng, KINDS, "friend", number(kinds[0])))
        kinds.append(favorite(rng, KINDS, "third", number(kinds[0])))
        while len(set(kinds)) < 3:
            kinds[1:] = rng.sample(KINDS, 2)
        if rng.random() < 0.06 and not {"girl", "boy"} & set(kinds):
            kinds[rng.choice((0, 0, 1))] = rng.choice(("girl", "boy"))
        leaning = number(kinds[0])
        objects[1] = favorite(rng, STORY_OBJECTS, "second", number(objects[0]))
        places = [favorite(rng, ALL_PLACES, "place", leaning), home(rng, kinds[0], leaning)]
        while objects[0] == objects[1]:
            objects[1] = rng.choice(STORY_OBJECTS)
        while places[0] == places[1]:
            places[0] = rng.choice(ALL_PLACES)
        classes = {}
        if rng.random() < 0.06:  # an invented word, so that the model learns to copy words
            slot = rng.randrange(5)
            word = invented(rng)
            if slot < 2:
                kinds[slot] = word
            elif slot < 4:
                objects[slot - 2] = word
            else:
                places[0] = word
        self.adjectives = {}
        names = []
        genders = []
        while len(names) < 3:
            female = lean(rng, 2, 77, number(kinds[len(names)]), 0.5) == 1
            name = favorite(rng, NAMES_F if female else NAMES_M, "name", number(kinds[len(names)]))
            if name not in names:
                names.append(name)
                genders.append(female)
        for i, role in enumerate("hft"):
            kind = kinds[i]
            if kind in ("girl", "princess", "queen", "witch", "grandmother", "mermaid", "hen", "cow"):
                female = True
            elif kind in ("boy", "prince", "king", "grandfather", "rooster", "wizard", "monk", "fisherman", "postman"):
                female = False
            else:
                female = genders[i]
            if female != genders[i]:
                pool = [n for n in (NAMES_F if female else NAMES_M) if n not in names]
                names[i] = rng.choice(pool)
            look = rng.choice(TRAITS) if rng.random() < 0.5 else None
            self.adjectives[role] = look
            slots[role] = kind
            slots[role.upper()] = names[i]
            slots["a" + role + "w"] = a(kind)
            slots["a" + role] = a((look + " " if look else "") + kind)
            he, him, his = ("she", "her", "her") if female else ("he", "him", "his")
            slots["he_" + role], slots["him_" + role], slots["his_" + role] = he, him, his
            if role == "h":
                slots["he"], slots["him"], slots["his"], slots["hisown"] = he, him, his, ("hers" if female else "his")
            elif role == "f":
                slots["fhe"], slots["fhim"], slots["fhis"] = he, him, his
        for name, word in (("o", objects[0]), ("o2", objects[1])):
            classes[name] = OBJECT_CLASS.get(word) or STORY_ONLY.get(word, "other")
            looks = FRESH_LOOKS if classes[name] in ("food", "plant") else OBJECT_LOOKS
            look = rng.choice(looks) if rng.random() < 0.4 else None
            self.adjectives[name] = look
            slots[name] = word
            slots["a" + name + "w"] = a(word)
            slots["a" + name] = a((look + " " if look else "") + word)
            slots["look_" + name] = expand(rng, LOOK[classes[name]], slots, None, leaning) if rng.random() < 0.7 else ""
        for name, word in (("p", places[0]), ("p2", places[1])):
            look = rng.choice(PLACE_LOOKS) if rng.random() < 0.35 and word not in ONLY_THE else None
            self.adjectives[name] = look
            cls, prep = PLACE_INFO.get(word, ("other", "in"))
            classes[name] = cls
            long = (look + " " if look else "") + word
            slots[name] = word
            slots[name.upper()] = long
            slots["in" + name] = f"{prep} the {word}"
            slots["in" + name.upper()] = f"{prep} the {long}"
            slots["to" + name] = f"to the {word}"
            slots["to" + name.upper()] = f"to the {long}"
            slots["the_" + name] = f"the {long}"
        slots["scene"] = expand(rng, SCENE[classes["p"]], slots, None, leaning) if rng.random() < 0.75 else ""
        slots["stuck"] = expand(rng, STUCK[classes["p"]], slots, None, leaning)
        slots["hide"] = favorite(rng, HIDE[classes["p"]], "hide", leaning)
        slots["food"], slots["hobby"] = favorite(rng, FOODS, "food", number(slots["f"])), favorite(rng, HOBBIES, "hobby", leaning)
        slots["season"] = favorite(rng, SEASONS, "season", leaning)
        fits = [name for name in PLOT_NAMES if classes["p"] in PLOT_PLACES.get(name, ANY_PLACE) and
                not (name == "broken" and classes["o"] in ("food", "plant", "cloth", "paper")) and (theme is None or theme in PLOT_THEMES[name])]
        self.plot = favorite(rng, fits or ["lost"], "plot", number(slots["o"]) ^ leaning)
        alone = self.plot in ("noise", "storm")
        self.theme = theme or rng.choice(PLOT_THEMES[self.plot])
        slots["moral"] = favorite(rng, MORALS[self.theme], "moral", leaning)
        first, second = ("h", "f") if rng.random() < 0.5 else ("f", "h")
        slots["W"], slots["V"] = slots[first.upper()], slots[second.upper()]
        for name in ("o", "o2"):
            for who, role in (("H", "h"), ("F", "f"), ("V", second)):
                inner = {"S": slots[role.upper()], "x": slots[name], "he_S": slots["he_" + role], "him_S": slots["him_" + role],
                         "they": slots["he"] if alone else "they", "them": slots["him"] if alone else "them"}
                slots[f"solve_{name}_{who}"] = expand(rng, SOLVE[classes[name]], inner, None, leaning)
            slots["JOY_" + name] = expand(rng, JOY[classes[name]], {"x": slots[name]}, None, leaning) if rng.random() < 0.5 else ""
        slots["FREE"] = expand(rng, FREE[classes["o"]], {"H": slots["H"], "F": slots["F"], "x": slots["o"], "he": slots["he"], "his": slots["his"]}, None, leaning)
        told = set()
        slots["THIRD"] = slots["THIRDH"] = slots["THIRDRACE"] = ""
        if want_third or rng.random() < 0.15:
            slots["THIRD"] = expand(rng, MACROS["third"], slots, told, leaning)
            slots["THIRDRACE"] = expand(rng, MACROS["third_race"], slots, told, leaning)
            slots["THIRDH"] = expand(rng, MACROS["third_one"], slots, told, leaning)
        text, questions = PLOTS[self.plot]
        if theme:
            text = text.replace("{@MORAL}", "{@MORAL_ALWAYS}")
        self.text = tidy(expand(rng, text.replace("\n", ""), slots, told, leaning))
        self.slots = slots
        self.told = told
        self.questions = [(q, ans) for q, ans in questions]
        self.questions += [(q, ans) for q, ans, fact in COMMON_QUESTIONS if fact is None or fact in told]
        self.key = "story:" + ":".join(slots[k] for k in ("H", "h", "F", "f", "o", "o2", "p"))

    def held_out(self):
        return held_out(self.key, 2)

    def request(self, rng, theme=None):
        """Returns a user's message that asks for this story."""
        slots = self.slots
        if theme:
            return expand(rng, ASK_STORY, {"about": theme})
        named = rng.choice(NAMED_THIRD if "third" in self.told else NAMED)
        if named is None:
            return expand(rng, ASK_ANY_STORY, {})
        if len(named) == 1 and rng.random() < 0.25 and slots[named[0]] not in ONLY_THE:
            return expand(rng, ASK_STORY, {"about": plural(slots[named[0]])})
        doing = PLOT_REQUESTS.get(self.plot)
        if doing and rng.random() < 0.12:
            return expand(rng, ASK_STORY, {"about": expand(rng, doing, slots)})
        named = list(named)
        if rng.random() < 0.6:
            rng.shuffle(named)
        bare = rng.random() < 0.08
        things = []
        for slot in named:
            word = slots[slot]
            if bare:
                things.append(word)
                continue
            look = self.adjectives[slot]
            phrase = f"{look} {word}" if look and rng.random() < 0.35 else word
            phrase = ("the " + phrase) if word in PLACE_INFO and rng.random() < 0.15 else a(phrase)
            if slot in "hf" and rng.random() < 0.08:
                phrase += rng.choice((" named ", " called ")) + slots[slot.upper()]
            elif slot == "h" and slots["h"] in ("girl", "boy") and rng.random() < 0.3:
                phrase = slots["H"]
            things.append(phrase)
        if len(things) == 1:
            about = things[0]
        elif bare:
            about = ", ".join(things)
        else:
            joined = rng.random()
            if joined < 0.75:
                about = ", ".join(things[:-1]) + " and " + things[-1]
            elif joined < 0.93:
                about = ", ".join(things[:-1]) + ("," if len(things) > 2 else "") + " and " + things[-1]
            else:
                about = " and ".join(things)
        return expand(rng, ASK_WORDS if bare and len(things) > 1 else ASK_STORY, {"about": about})


PLOT_REQUESTS = {
    "lost": "{ah} who [loses|lost] {ao}[| {inp}]", "found": "{ah} who [finds|found] {ao}[| {inp}]", "rescue": "{ah} who [helps|saves|rescues] {af}[| {inp}]",
    "fear": "{ah} who is afraid of the {p}", "noise": "{ah} who hears a strange noise", "race": "a race between {ah} and {af}", "gift": "{ah} who looks for a gift for {af}",
    "treasure": "{ah} and {af} who look for a treasure[| {inp}]", "quarrel": "{ah} and {af} who quarrel about {ao}", "storm": "{ah} and {af} in a storm",
}
IRREGULAR = {"wolf": "wolves", "mouse": "mice", "goose": "geese", "sheep": "sheep", "fish": "fish", "deer": "deer", "moose": "moose", "fisherman": "fishermen", "postman": "postmen",
             "snowman": "snowmen", "dwarf": "dwarves", "elf": "elves", "leaf": "leaves", "loaf": "loaves", "knife": "knives", "scarf": "scarves", "thief": "thieves", "bison": "bison"}


def plural(word):
    if word in IRREGULAR:
        return IRREGULAR[word]
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    return word[:-1] + "ies" if word.endswith("y") and word[-2] not in "aeiou" else word + "s"


NAMED = [("h", "o", "p")] * 8 + [("h", "o")] * 4 + [("h", "p")] * 3 + [("h", "f")] * 3 + [("h",)] * 3 + [("o",)] * 2 + [("p",)] + \
    [("o", "p")] * 2 + [("h", "f", "p")] * 2 + [("h", "f", "o")] * 3 + [("h", "f", "o", "p")] * 3 + [("h", "o", "o2")] * 2 + \
    [("h", "o", "o2", "p")] * 2 + [("o", "o2")] + [("h", "o", "p", "p2")] + [("h", "p", "p2")] + [("o", "o2", "p")] + [("p", "p2")] + [None] * 3
NAMED_THIRD = [("h", "f", "t")] * 4 + [("h", "f", "t", "o")] * 2 + [("h", "f", "t", "p")] * 2 + [("h", "f", "t", "o", "p")] + NAMED
ASK_STORY = ["Tell me a [|short |little |nice ]story about {about}[.|.|.|!|]", "[Please tell|Tell] me a story [about|with] {about}[.|, please.|]", "[Can|Could] you tell me a [|short |bedtime ]story about {about}?",
             "Write a [|short ]story about {about}[.|]", "Write me a story [about|with] {about}.", "I [would like|want] [to hear |]a story about {about}[.|, please.]", "A story about {about}[, please|][.|]",
             "[Please make|Make] up a story about {about}.", "Do you know a story about {about}?", "tell me a story about {about}", "a story about {about}", "[Hi|Hello]! Tell me a story about {about}.",
             "[Now tell|Tell] me [one|another one|another story] about {about}.", "Tell me a story about {about}.", "Tell me a story about {about}.", "Tell me a bedtime story about {about}.", "story about {about}"]
ASK_WORDS = ["[Tell|Write] [me |]a [short |]story with these [words|things]: {about}[.|]", "Tell me a story that uses these words: {about}[.|]", "Tell me a story about {about}[.|]"]
ASK_ANY_STORY = ["Tell me a [|short |nice |bedtime |little ]story[.|, please.|!|]", "[Can|Could] you tell me a [|short |bedtime ]story?", "[Please tell|Tell] me [any story|a story you like][.|]", "I [would like|want] [to hear |]a story[.|, please.]",
                 "[Write|Make up] a [|short ]story[.| for me.]", "tell me a story", "[Another|One more] story[, please|][.|!]", "story please"]


# ---------------------------------------------------------------------------------------------------------------------
# Small facts, for questions about a text that the user gives
# ---------------------------------------------------------------------------------------------------------------------

FACTS = [
    ("{N} put the {c}{o} {inp}.", [("Where is the {o}?", "The {o} is {inp}."), ("Who put the {o} {inp}?", "{N} put the {o} {inp}."), ("What did {N} put {inp}?", "{N} put the {o} {inp}.")]),
    ("{N} gave the {c}{o} to {M}.", [("Who gave the {o} to {M}?", "{N} gave the {o} to {M}."), ("Who got the {o}?", "{M} got the {o}."), ("What did {N} give to {M}?", "{N} gave the {o} to {M}."), ("Who has the {o} now?", "{M} has the {o} now.")]),
    ("{N} found {aco} {inp}.", [("Who found the {o}?", "{N} found the {o}."), ("Where did {N} find the {o}?", "{N} found the {o} {inp}."), ("What did {N} find?", "{N} found {ao}.")]),
    ("{N} lost the {c}{o} {inp}.", [("Who lost the {o}?", "{N} lost the {o}."), ("Where did {N} lose the {o}?", "{N} lost the {o} {inp}."), ("What did {N} lose?", "{N} lost the {o}.")]),
    ("{N} has {aco}.", [("What does {N} have?", "{N} has {ao}."), ("Who has the {o}?", "{N} has the {o}.")]),
    ("{N}'s {o} is {color}.", [("What color is {N}'s {o}?", "{N}'s {o} is {color}."), ("Whose {o} is {color}?", "{N}'s {o} is {color}.")]),
    ("{N} went to the {p}[| in the morning| yesterday].", [("Where did {N} go?", "{N} went to the {p}."), ("Who went to the {p}?", "{N} went to the {p}.")]),
    ("{N} likes {food}.", [("What does {N} like?", "{N} likes {food}."), ("Who likes {food}?", "{N} likes {food}.")]),
    ("{N} is {ak}.", [("Who is {N}?", "{N} is {ak}."), ("What is the {k}'s name?", "The {k}'s name is {N}."), ("Who is the {k}?", "{N} is the {k}.")]),
    ("{N} the {k} lives {inp}.", [("Where does {N} live?", "{N} lives {inp}."), ("Who lives {inp}?", "{N} the {k} lives {inp}."), ("Where does the {k} live?", "The {k} lives {inp}.")]),
    ("{N} saw {ak} {inp}.", [("What did {N} see?", "{N} saw {ak}."), ("Who saw the {k}?", "{N} saw the {k}."), ("Where did {N} see the {k}?", "{N} saw the {k} {inp}.")]),
    ("{N} ate the {food}.", [("Who ate the {food}?", "{N} ate the {food}."), ("What did {N} eat?", "{N} ate the {food}.")]),
]
FACT_FOODS = "soup bread pancakes stew popcorn noodles jam honey cheese rice salad".split()


def small_text(rng):
    """Returns a text of a few sentences with facts, and questions about it with answers."""
    count = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5))
    names = rng.sample(NAMES_F + NAMES_M, 2 * count)
    objects, places = rng.sample(ALL_OBJECTS, count), rng.sample(ALL_PLACES, count)
    kinds, foods, colors = rng.sample(KINDS, count), rng.sample(FACT_FOODS, count), rng.sample(COLORS, count)
    sentences, questions = [], []
    for i in range(count):
        template, asks = rng.choice(FACTS)
        color = colors[i] + " " if rng.random() < 0.4 else ""
        slots = {"N": names[2 * i], "M": names[2 * i + 1], "o": objects[i], "c": color, "color": colors[i], "aco": a(color + objects[i]), "ao": a(objects[i]),
                 "p": places[i], "inp": f"{PLACE_INFO[places[i]][1]} the {places[i]}", "k": kinds[i], "ak": a(kinds[i]), "food": foods[i]}
        sentences.append(expand(rng, template, slots))
        questions += [(expand(rng, q, slots), expand(rng, ans, slots)) for q, ans in asks]
    return " ".join(sentences), questions


ASK_ABOUT_TEXT = ["{text}\n\n[Question: |]{q}", "{text} {q}", "Here is a story: {text}\n\n{q}", "Read this[ story|]: {text}\n\n{q}", "Read the story and answer the question.\n\n{text}\n\n[Question: |]{q}", "{q}\n\n{text}",
                  "Story: {text}\nQuestion: {q}", "{text}\n{q}"]
ASK_ABOUT_STORY = ["{q}", "{q}", "{q}", "And {ql}", "[Tell me: |A question: |Do you remember: ]{ql}", "Thanks! {q}", "In the story, {ql}"]


# ---------------------------------------------------------------------------------------------------------------------
# Exact tasks: each gives (user's text, answer)
# ---------------------------------------------------------------------------------------------------------------------

ASK_ADD = ["What is {x} + {y}?", "What is {x} plus {y}?", "{x} + {y}", "{x}+{y}", "{x} + {y} =", "{x} + {y} = ?", "{x}+{y}=?", "Add {x} and {y}.", "Please add {x} and {y}.", "Calculate {x} + {y}.", "How much is {x} + {y}?",
           "How much is {x} plus {y}?", "What's {x} + {y}?", "What is the sum of {x} and {y}?", "[Can|Could] you add {x} and {y}?", "what is {x} + {y}", "what is {x}+{y}", "add {x} and {y}", "What is {x}+{y}?", "{x} plus {y}"]
ASK_SORT = ["Sort these words: {list}[.|]", "Sort these words alphabetically: {list}[.|]", "Sort [|the words |the following words: ]{list}[.|]", "[Put|Bring] these words in[| alphabetical] order: {list}[.|]", "Please sort: {list}[.|]",
            "[Can|Could] you sort these words? {list}", "Sort in alphabetical order: {list}[.|]", "Alphabetical order, please: {list}[.|]", "sort {list}", "sort these words: {list}", "Sort the words {list}[.|]"]
ASK_SPELL = ["Spell {w}.", "Spell the word {w}[.|]", "How do you spell {w}?", "How is {w} spelled?", "Please spell {w}.", "Spell {w} letter by letter.", "[Can|Could] you spell {w}?", "Spell: {w}", "spell {w}", "What are the letters of {w}?",
             "Spell the word {w} letter by letter."]
ASK_REVERSE = ["Reverse {w}.", "Reverse the word {w}[.|]", "What is {w} backwards?", "Write {w} backwards.", "Spell {w} backwards.", "How do you spell {w} backwards?", "[Can|Could] you reverse {w}?", "Reverse: {w}", "reverse {w}", "Say {w} backwards.",
               "What is {w} spelled backwards?", "Please reverse the word {w}."]


def add_numbers(rng):
    limit = rng.choice((10, 100, 100, 1000, 1000, 1000, 1000, 1000))
    other = rng.choice((limit, limit, limit, 10, 100, 1000))
    x, y = rng.randrange(limit), rng.randrange(other)
    return (x, y) if rng.random() < 0.5 else (y, x)


def addition(rng, held=False):
    while True:
        x, y = add_numbers(rng)
        if held_out(f"add:{min(x, y)}:{max(x, y)}", 2) == held:
            return expand(rng, ASK_ADD, {"x": str(x), "y": str(y)}), f"{x} + {y} = {x + y}"


def sorting(rng, held=False):
    while True:
        count = rng.choice((3, 4, 4, 5, 5, 6, 6))
        words = set()
        close = rng.random() < 0.3 and not held  # words with the same beginning are the hard ones
        if close:
            start = rng.randrange(len(WORDS))
            near = WORDS[start:start + 25]
        while len(words) < count:
            if rng.random() < 0.1 and not held:
                words.add(spelling_word(rng))
            elif close and rng.random() < 0.6:
                words.add(rng.choice(near))
            else:
                words.add(rng.choice(WORDS))
        ordered = sorted(words)
        if held_out("sort:" + ",".join(ordered), 2) == held:
            given = ordered[:]
            rng.shuffle(given)
            style = rng.random()
            listed = ", ".join(given) if style < 0.75 else " ".join(given) if style < 0.87 else ", ".join(given[:-1]) + " and " + given[-1]
            return expand(rng, ASK_SORT, {"list": listed}), "In order: " + ", ".join(ordered)


ENDINGS = "s ed er ing ly ness ful ish y en let est able less ment".split()
PIECES = []  # pieces of the tokenizer's vocabulary, set by train.py, so that each is spelled in many contexts


def spelling_word(rng):
    """Returns a word for the spelling tasks: a real one, one built from real ones or from tokens, an invented one, or
    random letters."""
    pick = rng.random()
    if pick < 0.35:
        return rng.choice(WORDS)
    if pick < 0.5:
        return (rng.choice(WORDS) + rng.choice(ENDINGS))[:12]
    if pick < 0.6:
        return (rng.choice(WORDS) + rng.choice(WORDS))[:12]
    if pick < 0.85 and PIECES:
        word = "".join(rng.choice(PIECES) for _ in range(rng.choice((1, 2, 2, 3))))[:11]
        return word if len(word) >= 3 else word + invented(rng, 1)
    if pick < 0.95:
        word = invented(rng)
        return word if len(word) >= 3 else word + "al"
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(3, 9)))


def word_is_held_out(word):
    return held_out("word:" + word, 12 if word in WORD_SET else 2)


WORD_SET = set(WORDS)


def pick_word(rng, held):
    while True:
        word = rng.choice(WORDS) if held else spelling_word(rng)
        if word_is_held_out(word) == held:
            return word


def quoted(rng, word):
    style = rng.random()
    return word if style < 0.6 else f'"{word}"' if style < 0.9 else f"'{word}'"


def spelling(rng, held=False):
    word = pick_word(rng, held)
    return expand(rng, ASK_SPELL, {"w": quoted(rng, word)}), "-".join(word)


def reversing(rng, held=False):
    word = pick_word(rng, held)
    return expand(rng, ASK_REVERSE, {"w": quoted(rng, word)}), "-".join(word) + " backwards is " + word[::-1]


# ---------------------------------------------------------------------------------------------------------------------
# Small talk
# ---------------------------------------------------------------------------------------------------------------------

CAN = "I can tell short stories about things that you name, add two numbers of up to three digits, sort words, spell and reverse words, and answer questions about a story."
TALK = [
    (["Who are you?", "What are you?", "who are you", "What is your name?", "What's your name?", "Are you [a robot|a person|human|an AI|ChatGPT|Qwen]?", "Tell me about yourself.", "Introduce yourself.", "What model are you?", "Who am I talking to?", "Who made you?",
      "[Hi|Hello], who are you?", "What kind of model are you?"],
     ["I am Ostinato's demo model, a very small language model. " + CAN]),
    (["What can you do?", "what can you do", "Help", "help", "help me", "How can you help me?", "What do you do?", "What can I ask you?", "What are you able to do?", "What should I ask?", "Can you help me?", "What are your skills?"], [CAN + " Try: Tell me a story about a fox, a lantern and a river."]),
    (["Hello", "Hi", "Hi!", "Hello!", "hello", "hi", "hey", "Hey!", "Hi there", "Hello there!", "Good [morning|evening|day|afternoon][!|.|]", "Greetings!"], ["Hello! I am Ostinato's demo model. Shall I tell you a story?"]),
    (["How are you?", "How are you today?", "how are you", "Hi, how are you?", "Hello! How are you?", "How is it going?", "How do you do?"], ["I am well, thank you. Shall I tell you a story, or add two numbers?"]),
    (["Thank you", "Thanks", "Thanks!", "Thank you!", "thanks", "Thank you very much.", "Thanks a lot!", "Great, thanks!", "[That was nice|Nice story|I like it|Great|Well done|Very good|Good job|Cool][!|.|]"], ["You are welcome!"]),
    (["Bye", "Goodbye", "Goodbye!", "bye", "Bye!", "See you!", "See you later.", "Good night[!|.|]"], ["Goodbye! Come back for another story."]),
    (["Yes", "Yes, please.", "Yes please", "Sure", "ok", "OK", "Okay", "No", "No, thanks.", "Maybe"], ["Tell me what the story should be about, for example a fox, a lantern and a river."]),
]
CANNOT = "I am a very small model and cannot do that. " + CAN
ONLY_ADD = "I can only add, and only two numbers of up to three digits."
TOPICS = """the weather|history|football|the moon|politics|money|cooking|quantum physics|music|computers|programming|France|Germany|Japan|China|America|Italy|Spain|India|London|Paris|Berlin|Rome|the sun|the stars|animals|dinosaurs|cars|the ocean|art|
love|time|life|the universe|science|math|chess|the internet|health|space|the news|movies|books|sleep|coffee|Python|Rust|Vulkan|electricity|gravity|Napoleon|Einstein|Shakespeare|the Roman Empire|World War II|climate change|biology|chemistry|
Mars|water|fire|gold|iron|philosophy|religion|school|the economy|trains|planes|bitcoin|photosynthesis|evolution|the brain|black holes|atoms|dogs|cats|birds|trees""".replace("\n", "").split("|")
COUNTRIES = "France Germany Italy Spain Japan China India Canada Brazil Mexico Egypt Kenya Norway Sweden Poland Greece Turkey Russia Australia Peru Chile Austria Portugal England Ireland Denmark Finland Hungary Korea Vietnam".split()
ASK_ELSE = ["What is the capital of {country}?", "Where is {country}?", "How many people live in {country}?", "Who is the president of {country}?", "What is the biggest city in {country}?", "Tell me about {topic}.", "What do you think about {topic}?",
            "Explain {topic}[.| to me.]", "How does {topic} work?", "What is {topic}?", "Why is {topic} important?", "Write [a poem|an essay|a song|an email|a letter|a report|a haiku] about {topic}.", "Translate {topic} into [French|German|Spanish|Italian].",
            "What is the [weather|time|date] [today|now]?", "What day is it[ today|]?", "Write a [Python|Rust|C] program[| that sorts a list| for me].", "Write some code.", "How old are you?", "Where do you live?", "What is the meaning of life?", "Tell me a joke.", "Sing me a song.",
            "Who won the [game|match|election]?", "How do I [cook|bake|make|fix|build|clean|buy] [a |an old |my ][{object}|{object}|house|car|computer]?", "What is your favorite [color|food|movie|book|song]?", "Give me a recipe[| for {food}].", "Draw a picture of a {object}.",
            "Who wrote [Hamlet|Faust|the Bible|War and Peace]?", "Who was [Napoleon|Einstein|Shakespeare|Mozart|Caesar]?", "When was [the war|{country} founded|the first {object} made]?", "What does {topic} mean?", "Can you [drive|cook|dance|sing|draw|fly|see me]?",
            "What do [cats|dogs|birds|bears|horses] eat?", "How far is the [moon|sun]?", "How tall is [the Eiffel Tower|Mount Everest]?", "Why is the sky blue?", "[Do you like|Do you know] {topic}?", "Summarize {topic}.", "What is the [best|largest|smallest|fastest] [{object}|animal|country|car]?",
            "Play a game with me.", "Book a [flight|hotel|table].", "What is love?", "I am [bored|sad|hungry|tired]."]
ASK_OTHER_MATH = ["What is {x} [-|minus|*|times|/|divided by|x] {y}?", "{x} [-|*|/|x] {y}", "{x}[-|*|/]{y}", "Multiply {x} [and|by] {y}.", "Subtract {x} from {y}.", "Divide {x} by {y}.", "What is the square root of {x}?", "What is {x} + {y} + {z}?", "What is {big} + {y}?", "Add {x} and {big}.",
                  "{big} + {big2}", "What is {x} percent of {y}?", "Is {x} a prime number?", "How much is {x} [times|minus|divided by] {y}?"]


def small_talk(rng, held=False):
    pick = rng.random()
    if pick < 0.5:
        asks, answers = rng.choice(TALK)
        return expand(rng, asks, {}), rng.choice(answers)
    if pick < 0.85:
        return expand(rng, ASK_ELSE, {"topic": rng.choice(TOPICS), "country": rng.choice(COUNTRIES), "object": rng.choice(ALL_OBJECTS), "food": rng.choice(FOODS)}), CANNOT
    x, y = add_numbers(rng)
    return expand(rng, ASK_OTHER_MATH, {"x": str(x), "y": str(y), "z": str(rng.randrange(1000)), "big": str(rng.randrange(1000, 100000)), "big2": str(rng.randrange(1000, 100000))}), ONLY_ADD


# ---------------------------------------------------------------------------------------------------------------------
# Chats: lists of messages
# ---------------------------------------------------------------------------------------------------------------------

def message(role, content):
    return {"role": role, "content": content}


def lower_first(question):
    return question[0].lower() + question[1:]


def unanswerable(rng, story):
    """Returns a question about a thing or a person that does not occur in the story."""
    text = story.text
    while True:
        word, name = rng.choice(ALL_OBJECTS), rng.choice(NAMES_F + NAMES_M)
        if word not in text and name not in text:
            return rng.choice((f"Who found the {word}?", f"Who lost the {word}?", f"Where was the {word}?", f"Who was {name}?", f"What did {name} find?", f"Whose {word} was it?", f"Where did {name} live?", f"Who had the {word}?"))


def story_question(rng, story):
    if rng.random() < 0.06:
        return unanswerable(rng, story), NOT_TOLD
    q, ans = rng.choice(story.questions)
    return expand(rng, q, story.slots), expand(rng, ans, story.slots)


def make_story(rng, held=False):
    while True:
        theme = rng.choice(THEMES) if rng.random() < 0.04 else None
        story = Story(rng, theme, want_third=rng.random() < 0.1)
        if story.held_out() == held:
            return story, theme


def story_chat(rng, held=False):
    story, theme = make_story(rng, held)
    return [message("user", story.request(rng, theme)), message("assistant", story.text)]


def told_question_chat(rng, held=False, questions=None):
    """Returns a chat in which the assistant tells a story, followed by questions about it."""
    story, theme = make_story(rng, held)
    chat = [message("user", story.request(rng, theme)), message("assistant", story.text)]
    for _ in range(questions or rng.choice((1, 2, 3, 3, 4))):
        q, ans = story_question(rng, story)
        chat += [message("user", expand(rng, ASK_ABOUT_STORY, {"q": q, "ql": lower_first(q)})), message("assistant", ans)]
    return chat


def given_question_chat(rng, held=False, questions=None):
    """Returns a chat in which the user gives a text (a story or a few facts) with a question about it, possibly
    followed by more questions."""
    count = questions or rng.choice((1, 1, 2, 3, 4))
    while True:
        if rng.random() < 0.5:
            story, _ = make_story(rng, held)
            text, pairs = story.text, [story_question(rng, story) for _ in range(count)]
        else:
            text, pairs = small_text(rng)
            if held_out("facts:" + text, 2) != held:
                continue
            pairs = rng.sample(pairs, min(count, len(pairs)))
        break
    q, ans = pairs[0]
    chat = [message("user", expand(rng, ASK_ABOUT_TEXT, {"text": text, "q": q})), message("assistant", ans)]
    for q, ans in pairs[1:]:
        chat += [message("user", expand(rng, ASK_ABOUT_STORY, {"q": q, "ql": lower_first(q)})), message("assistant", ans)]
    return chat


TASKS = {"addition": addition, "sorting": sorting, "spelling": spelling, "reversing": reversing, "small talk": small_talk}
SYSTEM = ["You are a helpful assistant.", "You are Ostinato's demo model.", "Be brief.", "You are a friendly storyteller.", "Answer the user's questions.", "You are a helpful, honest assistant."]


def task_chat(rng, kind, held=False):
    ask, answer = TASKS[kind](rng, held)
    return [message("user", ask), message("assistant", answer)]


def training_chat(rng):
    """Returns one chat of the training corpus."""
    pick = rng.random()
    if pick < 0.13:
        chat = story_chat(rng)
    elif pick < 0.21:
        chat = told_question_chat(rng)
    elif pick < 0.29:
        chat = given_question_chat(rng)
    elif pick < 0.32:  # a longer chat with several topics
        chat = []
        for _ in range(rng.choice((2, 3, 3, 4))):
            part = rng.random()
            if part < 0.25:
                chat += story_chat(rng)
            elif part < 0.4:
                chat += told_question_chat(rng)
            elif part < 0.5:
                chat += given_question_chat(rng, questions=1)
            else:
                chat += task_chat(rng, rng.choice(list(TASKS)))
    else:
        kind = rng.choice(("addition", "addition", "addition", "sorting", "sorting", "spelling", "spelling", "reversing", "reversing", "small talk"))
        chat = task_chat(rng, kind)
        while rng.random() < 0.25:
            chat += task_chat(rng, rng.choice(list(TASKS)))
    if rng.random() < 0.05:
        chat = [message("system", rng.choice(SYSTEM))] + chat
    return chat


def heldout_tasks(count, seed=7):
    """Returns the held-out exact tasks: at most `count` of each kind, each with the chat before the answer and the
    expected answer."""
    makers = {kind: (lambda rng, kind=kind: task_chat(rng, kind, held=True)) for kind in ("addition", "sorting", "spelling", "reversing")}
    makers["question about a story told"] = lambda rng: told_question_chat(rng, held=True, questions=1)
    makers["question about a text given"] = lambda rng: given_question_chat(rng, held=True, questions=1)
    tasks = []
    for kind, make in makers.items():
        rng = random.Random(f"{seed}:{kind}")
        seen = set()
        words = sum(word_is_held_out(word) for word in WORDS)
        most = min(count, words) if kind in ("spelling", "reversing") else count
        while len(seen) < most:
            chat = make(rng)
            answer = chat.pop()["content"]
            key = answer if kind in ("spelling", "reversing", "addition", "sorting") else json.dumps(chat)
            if key not in seen:
                seen.add(key)
                tasks.append({"kind": kind, "messages": chat, "answer": answer})
    return tasks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sample = commands.add_parser("sample", help="print chats")
    sample.add_argument("--count", type=int, default=10)
    sample.add_argument("--seed", type=int, default=1)
    sample.add_argument("--stories", action="store_true", help="stories only")
    heldout = commands.add_parser("heldout", help="write the held-out tasks")
    heldout.add_argument("path")
    heldout.add_argument("--count", type=int, default=100, help="tasks of each kind")
    args = parser.parse_args()
    if args.command == "sample":
        rng = random.Random(args.seed)
        for _ in range(args.count):
            for entry in story_chat(rng) if args.stories else training_chat(rng):
                print(f"{entry['role']}: {entry['content']}")
            print()
    else:
        with open(args.path, "w", encoding="utf-8") as out:
            for task in heldout_tasks(args.count):
                out.write(json.dumps(task, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
