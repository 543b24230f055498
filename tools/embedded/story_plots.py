"""The plots: what happens in the stories, as beats of templates.

Every name, pronoun, object and place in a story is bound by its first mention, so a model that continues a story has to
look back for it. Templates within a beat are alternatives; a guard ties an alternative to what happened before.
"""

from story_beats import HABIT, MEETING, MEETING_WHEN_STUCK, OPENING, PARTING, RESCUE, STUCK, THE_END, TRY
from story_grammar import Beat, Plot, beat


def _title(*lines: str) -> Beat:
    return beat(*lines, probability=0.3)


LOST = Plot(
    "lost",
    (
        _title(
            "The {hero.Kind} and the {thing.Look} {thing.Title}",
            "The Lost {thing.Title}",
            "How {hero} Lost the {thing.Look} {thing.Title}",
        ),
        OPENING,
        HABIT,
        beat(
            "More than anything, {hero} loved {hero.his} {thing.look} {thing}.",
            "{hero} had a {thing.look} {thing}, and {hero.he} took it everywhere.",
            "{hero.His} grandmother had given {hero.him} a {thing.look} {thing}.",
            "The best thing that {hero} owned was a {thing.look} {thing}.",
        ),
        beat(
            "One {*weather} {*daytime}, the {thing} was gone.",
            "But one {*daytime}, {hero} looked in {hero.his} bag, and the {thing} was not there.",
            "One {*daytime}, {hero.he} came home and saw that the {thing.look} {thing} was missing.",
            "Then, on a {*weather} {*daytime}, {hero} lost the {thing}.",
            paragraph=True,
        ),
        beat(
            "{hero} was very {*sad}.",
            '"Oh no! Where is my {thing}?" cried {hero}.',
            "{hero.He} sat down and began to cry.",
            '"I must find my {thing.look} {thing}," said {hero}.',
            probability=0.8,
        ),
        beat(
            "{hero.He} looked {spot.at}, but {hero.he} found only {*trifle}.",
            "First, {hero.he} went {spot.to} and looked everywhere, but the {thing} was not there.",
            "{hero.He} ran {spot.to}, but all that {hero.he} saw was {*trifle}.",
        ),
        beat(
            "Then {hero.he} looked {other.at}, but there was no {thing} there.",
            "After that, {hero.he} looked {other.at}, and again {hero.he} found only {*trifle}.",
            probability=0.7,
        ),
        MEETING,
        beat(
            '"What is wrong?" asked {helper}. "I lost my {thing.look} {thing}," said {hero}.',
            '"Why are you so {*sad}?" asked the {helper.kind}. "My {thing} is gone," said {hero}.',
            '"Did you see a {thing.look} {thing}?" asked {hero}. "No," said {helper}, "but I can help you."',
        ),
        beat(
            '"Let us look {found.at}," said {helper}.',
            '"Maybe it is {found.at}," said {helper}. "Come with me."',
            '{helper} thought for a moment. "You were {found.at} last week," {helper.he} said.',
        ),
        beat(
            "So {hero} and {helper} went {found.to} together.",
            "They ran {found.to} as fast as they could.",
            "The {hero.kind} and the {helper.kind} walked {found.to}.",
        ),
        beat(
            "There, under {*cover}, was the {thing.look} {thing}!",
            "{helper} looked behind {*cover} and found the {thing}.",
            "{hero} looked under {*cover}, and there it was, the {thing.look} {thing}!",
        ),
        beat(
            '"Thank you, {helper}!" said {hero}. "You are a true friend."',
            "{hero} was so {*glad} that {hero.he} hugged {helper}.",
            '"I am so {*glad} that I met you, {helper}," said {hero}.',
        ),
        PARTING,
        beat(
            "And {hero} never lost the {thing.look} {thing} again.",
            "The {thing} had a safe place now, next to the bed of the {hero.kind}.",
            "{hero} had learned that it is good to ask for help.",
            probability=0.6,
        ),
        THE_END,
    ),
)

JOURNEY = Plot(
    "journey",
    (
        _title(
            "The {thing.Look} {thing.Title}",
            "{hero} Goes to the {goal.Title}",
            "The Journey of a {hero.Trait} {hero.Kind}",
        ),
        OPENING,
        HABIT,
        beat(
            "One {*daytime}, {hero} heard that there was a {thing.look} {thing} {goal.at}.",
            "An old {elder.kind} told {hero} about a {thing.look} {thing} {goal.at}.",
            "One {*weather} {*daytime}, {hero} found a map. It showed a {thing.look} {thing} {goal.at}.",
            "{hero} dreamed of a {thing.look} {thing}. In the dream, it was {goal.at}.",
            paragraph=True,
        ),
        beat(
            '"I want to see that {thing} with my own eyes," said {hero}.',
            '"I will go {goal.to} and find it," said {hero}.',
            "{hero.He} wanted to go {goal.to} at once.",
        ),
        beat(
            "So {hero.he} packed some {snack} and said goodbye to everyone.",
            "{hero.He} put some {snack} into a bag and set off.",
        ),
        beat(
            "{hero.He} walked past {way.the} and over the fields.",
            "First, {hero.he} came to {way.the}, and there {hero.he} took a short rest.",
            probability=0.7,
        ),
        STUCK,
        TRY,
        MEETING_WHEN_STUCK,
        beat(
            '"Where are you going?" asked {helper}. "I am going {goal.to}," said {hero}, "but I am stuck."',
            '"I want to go {goal.to}," said {hero}. "Can you help me?"',
            '"Hello," said {hero}. "I am {hero}, and I am looking for a {thing.look} {thing}."',
        ),
        RESCUE,
        beat(
            "Later, {hero} shared the {snack} with {helper}.",
            '"Thank you, {helper}," said {hero}, and {hero.he} gave {helper.him} half of the {snack}.',
        ),
        beat(
            "At last they came {goal.to}, and there was the {thing.look} {thing}.",
            "In the evening, the {hero.kind} and the {helper.kind} reached {goal.the}. The {thing} was there!",
            "The next day, they stood {goal.at} and looked at the {thing.look} {thing}.",
            paragraph=True,
        ),
        beat(
            '"It is even more beautiful than I thought," said {hero}.',
            '"Without you, I would never have found it," said {hero} to {helper}.',
            "{hero} was so {*glad} that {hero.he} danced around the {thing}.",
        ),
        PARTING,
        beat(
            "[obstacle=river] And whenever {hero} sees a river, {hero.he} thinks of {helper} and the boat.",
            "[obstacle=wall] And whenever {hero} sees a wall, {hero.he} thinks of {helper} and the ladder.",
            "[obstacle=tunnel] And whenever {hero} walks in the dark, {hero.he} thinks of {helper} and the lamp.",
            "[obstacle=hole] And {hero} always looks at the path now.",
            "[obstacle=snow] And whenever it snows, {hero} thinks of {helper} and the sled.",
            "[obstacle=storm] And whenever it rains, {hero} thinks of {helper} and the tent.",
            probability=0.7,
        ),
        THE_END,
    ),
)

GIFT = Plot(
    "gift",
    (
        _title(
            "The {thing.Title} for {friend}", "The Birthday of {friend}", "{hero} and the {thing.Look} {thing.Title}"
        ),
        OPENING,
        beat(
            "{hero.His} best friend was a {friend.trait} {friend.kind} named {friend}.",
            "{hero} had a friend, {friend.a_kind} named {friend}, who was very {friend.trait}.",
        ),
        HABIT,
        beat(
            "Soon it was the birthday of {friend}, and {hero} wanted to give {friend.him} a {thing.look} {thing}.",
            "{friend} had always wanted a {thing.look} {thing}, and tomorrow was {friend.his} birthday.",
            paragraph=True,
        ),
        beat(
            "The {thing} in the shop cost {price} coins, but {hero} had only {purse}.",
            '"{thing.A} costs {price} coins," said {hero}, "and I have only {purse}."',
        ),
        beat("{hero} was {*sad}.", "{hero.He} thought about it all night long.", probability=0.5),
        beat(
            "The next morning, {hero.he} met {helper}, a {helper.trait} {helper.kind} who lived {spot.at}.",
            "Then {hero.he} went {spot.to}, where a {helper.trait} {helper.kind} named {helper} lived.",
            paragraph=True,
        ),
        beat(
            '"If you {job} for me, I will give you {price} coins," said {helper}.',
            '"I have to {job}, but I am too tired," said {helper}. "Can you help me for {price} coins?"',
        ),
        beat(
            "All {*daytime} long, {hero} {job.past}.",
            "So {hero} {job.past}, and {hero.he} did it well.",
            '"I will do it," said {hero}, and {hero.he} {job.past} until the sun went down.',
        ),
        beat(
            "{helper} smiled and gave {hero.him} {price} coins.",
            '"You did good work," said {helper}, and {helper.he} put {price} coins on the table.',
            "{helper} was so {*glad} that {helper.he} paid {hero.him} at once.",
        ),
        beat(
            "{hero} ran to the shop and bought the {thing.look} {thing}.",
            "Now {hero.he} had enough, and {hero.he} bought the {thing} for {hero.his} friend.",
        ),
        beat(
            'At the party, {hero} gave the {thing} to {friend}. "Happy birthday!" said the {hero.kind}.',
            "On the birthday, {friend} opened the box and saw the {thing.look} {thing}.",
            paragraph=True,
        ),
        beat(
            '"It is the best present of all," said {friend}.',
            "{friend} laughed and hugged {hero}.",
            '"A {thing.look} {thing}! Thank you, {hero}!" said {friend}.',
        ),
        beat(
            "They ate cake, and {hero} told {friend} how {hero.he} {job.past} for {helper}.",
            "{friend} kept the {thing} for the rest of {friend.his} life.",
            "And {hero} had learned that work can be a gift too.",
            "The {hero.kind} and the {friend.kind} were {*glad}.",
        ),
        THE_END,
    ),
)

BAKE = Plot(
    "bake",
    (
        _title("The Best {dish.Title}", "{hero} Makes a {dish.Title}", "The {hero.Kind} Who Made a {dish.Title}"),
        OPENING,
        HABIT,
        beat(
            "One {*daytime}, {hero} wanted to make a {dish} for {*occasion}.",
            "Tomorrow was {*occasion}, and {hero} had promised to bring a {dish}.",
            paragraph=True,
        ),
        beat(
            "For the {dish}, {hero.he} needed {first}, {second}, and {third}.",
            'In the old book it said: "Take {first}, {second}, and {third}."',
            '"I need {first}, {second}, and {third}," said {hero.he}.',
        ),
        beat(
            "But there was no food in the house.", "But {hero.his} shelf was empty.", "But {hero.he} had none of them."
        ),
        beat(
            "So {hero} went {spot.to} and found some {first}.",
            "{hero.He} went {spot.to} first, and there {hero.he} got the {first}.",
        ),
        beat(
            "Then {hero.he} walked {other.to}, where {hero.he} found the {second}.",
            "After that, {hero.he} got some {second} {other.at}.",
        ),
        beat(
            "For the {third}, {hero.he} asked everyone, but nobody had any.",
            "But {hero.he} could not find any {third}, and it was getting late.",
            "{hero.He} looked everywhere for the {third}, but in vain.",
        ),
        MEETING,
        beat(
            '"I have some {third} at home," said {helper}. "Come with me."',
            '"Do you need {third}?" asked {helper}. "I have more than enough."',
            '"Take my {third}," said the {helper.kind}, "if I may have a bit of the {dish}."',
        ),
        beat(
            "At home, they put the {first}, the {second}, and the {third} into a big bowl.",
            "{hero} took the {first}, {helper} took the {second}, and together they added the {third}.",
            paragraph=True,
        ),
        beat("Soon the whole house smelled of {dish}.", "They waited and waited, and then the {dish} was ready."),
        beat(
            '"This is the best {dish} in the world," said {helper}.',
            "Everyone at the table wanted more of the {dish}.",
            '"The secret is the {third} from {helper}," said {hero}.',
        ),
        PARTING,
        THE_END,
    ),
)

SHARE = Plot(
    "share",
    (
        _title("The {hero.Kind} Who Shared", "{hero} and {helper}", "A Bag of {snack.Title}"),
        OPENING,
        HABIT,
        beat(
            "One {*weather} {*daytime}, {hero} was on the way {goal.to} with a bag of {snack}.",
            "One {*daytime}, {hero.he} took some {snack} and went {goal.to}.",
            paragraph=True,
        ),
        beat(
            "Next to the path sat a {helper.trait} {helper.kind} named {helper}, who looked hungry.",
            "There {hero.he} met {helper}, a {helper.trait} {helper.kind} who had not eaten for two days.",
        ),
        beat(
            '"May I have some of your {snack}?" asked {helper}.',
            '"I am so hungry," said {helper}, "and I can smell your {snack}."',
            "{helper} looked at the {snack} and said nothing.",
        ),
        beat(
            "{hero} did not have much, but {hero.he} gave half of the {snack} to {helper}.",
            '"We can share," said {hero}, and they ate the {snack} together.',
            '"Take it all," said {hero}. "I can eat at home."',
        ),
        beat('"I will not forget this," said {helper}.', "{helper} thanked {hero.him} and went away.", probability=0.8),
        beat(
            "A few days later, {hero} was on the way home.",
            "The next {*season}, {hero} had to go {goal.to} again.",
            "Some time later, {hero} took a walk.",
            paragraph=True,
        ),
        STUCK,
        TRY,
        beat(
            '"Who can help me now?" said {hero}. Then {hero.he} saw the {helper.kind}. It was {helper}!',
            "Then somebody called {hero.his} name. It was {helper}!",
            "And who came down the path? It was {helper}, the {helper.trait} {helper.kind}!",
        ),
        RESCUE,
        beat(
            '"You shared your {snack} with me," said {helper}. "Now I can help you."',
            '"Do you remember the {snack}?" asked {helper}. "That was the best meal of my life."',
        ),
        PARTING,
        beat(
            "And they always had some {snack} with them.",
            "Since then, {hero} always takes some more {snack}, for somebody may be hungry.",
            "A kind deed always comes back.",
            probability=0.6,
        ),
        THE_END,
    ),
)

REPAIR = Plot(
    "repair",
    (
        _title(
            "The Broken {repair.Title}", "{hero} and the {repair.Title}", "How the {hero.Kind} Fixed a {repair.Title}"
        ),
        OPENING,
        HABIT,
        beat(
            "One {*weather} {*daytime}, there was a loud crack. The {repair} was broken!",
            "One {*daytime}, the old {repair} of the {hero.kind} fell to pieces.",
            "Then, on a {*weather} {*daytime}, {hero.his} {repair} broke.",
            paragraph=True,
        ),
        beat(
            '"What shall I do without my {repair}?" said {hero}.',
            '"I will fix the {repair} myself," said {hero}.',
            "{hero} was {*sad}, for {hero.he} needed the {repair} every day.",
        ),
        beat(
            "{hero.He} worked all {*daytime}, but the {repair} broke again.",
            "{hero.He} tried to fix it with bare hands, but it did not hold.",
            "{hero.He} tried and tried, but it only got worse.",
        ),
        beat(
            "So {hero.he} went {spot.to} and asked for help, but nobody had time.",
            "{hero.He} asked an old {elder.kind} {spot.at}, but {elder.he} shook {elder.his} head.",
            probability=0.6,
        ),
        MEETING,
        beat(
            '"My {repair} is broken," said {hero}. "All you need is some {tool}," said {helper}.',
            '"I can fix a {repair}," said {helper}, "but we need some {tool}."',
            '"Do not be {*sad}," said {helper}. "With some {tool}, we can fix your {repair}."',
        ),
        beat(
            "They found the {tool} {found.at}.",
            '"There is some {tool} {found.at}," said {hero}, and they went to get it.',
            "{helper} had some {tool} at home, {found.at}.",
        ),
        beat(
            "Then the {hero.kind} held the {repair}, and the {helper.kind} used the {tool}.",
            "{helper} showed {hero.him} how to use the {tool}, and they worked until the evening.",
            "With the {tool}, the work was easy.",
            paragraph=True,
        ),
        beat(
            "Soon the {repair} was as good as new.",
            "When they were done, the {repair} was better than before.",
        ),
        beat(
            '"Thank you, {helper}," said {hero}. "You are very {helper.trait}."',
            '"I could not have done it without you," said {hero} to {helper}.',
            "{hero} was so {*glad} that {hero.he} made tea for {helper}.",
        ),
        PARTING,
        beat(
            "And the {repair} never broke again.",
            "Now {hero} always keeps some {tool} in the house.",
            "And if you have a broken {repair}, go and ask {hero}.",
            probability=0.6,
        ),
        THE_END,
    ),
)

FEAR = Plot(
    "fear",
    (
        _title("The Brave {hero.Kind}", "{hero} Is Not Afraid", "How {helper} Helped {hero}"),
        OPENING,
        HABIT,
        beat(
            "[fear=dark] But {hero} was afraid of the dark.",
            "[fear=thunder] But {hero} was afraid of thunder.",
            "[fear=wind] But {hero} was afraid of the wind.",
            "[fear=water] But {hero} was afraid of deep water.",
        ),
        beat(
            "[fear=dark] One {*daytime}, {hero.he} stayed too long {spot.at}, and the sun went down.",
            "[fear=thunder] One {*weather} {*daytime}, {hero.he} was {spot.at} when a storm began.",
            "[fear=wind] One {*daytime}, {hero.he} was {spot.at}, and the wind began to howl.",
            "[fear=water] One {*weather} {*daytime}, {hero.he} was {spot.at}. Everyone else was in the water.",
            paragraph=True,
        ),
        beat(
            "{hero} wanted to run away, but {hero.his} legs did not move.",
            '"I want to go home," said {hero} in a small voice.',
            "{hero.He} closed {hero.his} eyes and shook like a leaf.",
        ),
        MEETING,
        beat(
            '[fear=dark] "Are you afraid of the dark?" asked {helper}. "So was I."',
            '[fear=thunder] "Are you afraid of the thunder?" asked {helper}. "So was I."',
            '[fear=wind] "Are you afraid of the wind?" asked {helper}. "So was I."',
            '[fear=water] "Are you afraid of the water?" asked {helper}. "So was I."',
        ),
        beat(
            '"What do you do then?" asked {hero}. "I {trick}," said {helper}.',
            '"When I am afraid, I {trick}," said the {helper.kind}. "Try it!"',
        ),
        beat(
            "So {hero} {trick.past}, and {hero.his} heart became calm.",
            "{hero} and {helper} {trick.past} together, and it helped.",
            "{hero.He} {trick.past} once, and then {hero.he} {trick.past} again.",
        ),
        beat(
            "[fear=dark] Above them, the stars came out one by one.",
            "[fear=thunder] Soon the storm moved on, and a rainbow stood over {spot.the}.",
            "[fear=wind] Now the wind sounded almost like music.",
            "[fear=water] Then {hero.he} put one foot into the water, and it was warm.",
        ),
        beat(
            '"You are a brave {hero.kind}, {hero}," said {helper}.',
            '"I am not afraid now," said {hero}. "Thank you, {helper}."',
            "{hero} was so {*glad} that {hero.he} laughed out loud.",
        ),
        PARTING,
        beat(
            "[fear=dark] And whenever the night is dark, {hero} remembers what {hero.he} learned {spot.at}.",
            "[fear=thunder] And whenever there is thunder, {hero} remembers the {helper.trait} {helper.kind}.",
            "[fear=wind] And whenever the wind howls, {hero} remembers what {helper} said.",
            "[fear=water] And now {hero} is the first one in the water.",
            probability=0.7,
        ),
        THE_END,
    ),
)

PLOTS = (LOST, JOURNEY, GIFT, BAKE, SHARE, REPAIR, FEAR)
