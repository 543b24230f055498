"""Beats that several plots share."""

from story_grammar import beat

OPENING = beat(
    "Once upon a time, there was a {hero.trait} {hero.kind} named {hero}. {hero.He} lived {home.at}.",
    "Once upon a time, {home.at}, there lived a {hero.trait} {hero.kind} named {hero}.",
    "There once was a {hero.trait} {hero.kind} named {hero}, and {hero.his} home was {home.at}.",
    "A {hero.trait} {hero.kind} named {hero} lived {home.at}.",
    "{home.At}, there lived a {hero.trait} {hero.kind}. {hero.His} name was {hero}.",
    "Long ago, there was {hero.a_kind} named {hero}. {hero.He} was {hero.trait}, and {hero.he} lived {home.at}.",
    "This is the story of {hero}, a {hero.trait} {hero.kind} who lived {home.at}.",
    paragraph=True,
)
HABIT = beat(
    "{hero} loved to {*hobby}.",
    "Every {*daytime}, {hero.he} liked to {*hobby}.",
    "In summer, {hero.he} liked to {*hobby}, and in winter, {hero.he} liked to {*pastime}.",
    "{hero.He} liked to {*hobby} and to {*pastime}.",
    "Nobody liked to {*pastime} as much as {hero}.",
    probability=0.7,
)
MEETING = beat(
    "Just then, a {helper.trait} {helper.kind} named {helper} came by.",
    "On the way, {hero.he} met a {helper.trait} {helper.kind} named {helper}.",
    "Then {hero.he} heard a voice. It was {helper}, a {helper.trait} {helper.kind}.",
    "A {helper.trait} {helper.kind} was sitting next to the path. {helper.His} name was {helper}.",
    paragraph=True,
)
MEETING_WHEN_STUCK = beat(
    "Just then, a {helper.trait} {helper.kind} named {helper} came by.",
    "Then {hero.he} heard a voice. It was {helper}, a {helper.trait} {helper.kind}.",
    "After a while, a {helper.trait} {helper.kind} came along. {helper.His} name was {helper}.",
    paragraph=True,
)
PARTING = beat(
    "From that day on, {hero} and {helper} were best friends.",
    "{hero} and {helper} stayed friends for the rest of their lives.",
    "After that, the {hero.kind} and the {helper.kind} met every {*daytime}.",
    "That night, {hero} went to sleep with a smile on {hero.his} face.",
    "And so the {hero.trait} {hero.kind} and the {helper.trait} {helper.kind} became friends.",
    paragraph=True,
)
THE_END = beat("The end.", probability=0.3)

# Being stuck, trying alone, and being helped: the guards keep the three true to one obstacle.
STUCK = beat(
    "[obstacle=river] But soon {hero.he} came to a wide river, and there was no way across.",
    "[obstacle=wall] But then a high wall stood in the way.",
    "[obstacle=tunnel] But the path went through a dark tunnel, and {hero.he} could not see a thing.",
    "[obstacle=hole] But {hero.he} did not look at the path, and {hero.he} fell into a deep hole.",
    "[obstacle=snow] But the path was covered with deep snow.",
    "[obstacle=storm] But then a storm came up, and the rain was cold and heavy.",
)
TRY = beat(
    "[obstacle=river] {hero.He} tried to swim, but the water was too fast.",
    "[obstacle=river] {hero.He} tried to jump from stone to stone, but {hero.he} only got wet.",
    "[obstacle=wall] {hero.He} tried to climb it, but the stones were too smooth.",
    "[obstacle=wall] {hero.He} looked for a door in the wall, but there was none.",
    "[obstacle=tunnel] {hero.He} took one step and bumped into a rock.",
    "[obstacle=tunnel] {hero.He} called into the tunnel, but only the echo answered.",
    "[obstacle=hole] {hero.He} tried to climb out, but the sides were too steep.",
    "[obstacle=hole] {hero.He} called for help three times.",
    "[obstacle=snow] {hero.He} took ten steps and sank up to {hero.his} nose.",
    "[obstacle=snow] {hero.He} tried to walk, but {hero.his} feet got stuck.",
    "[obstacle=storm] {hero.He} tried to run, but the wind was too strong.",
    "[obstacle=storm] {hero.He} hid under a bush, but {hero.he} got wet anyway.",
)
RESCUE = beat(
    '[obstacle=river] "I have a boat," said {helper}, and {helper.he} rowed {hero} across the river.',
    '[obstacle=river] {helper} had a little boat. "Jump in!" said {helper.he} to {hero}.',
    '[obstacle=wall] "I have a ladder," said {helper}, and they climbed over the wall together.',
    '[obstacle=wall] {helper} had a long ladder. "After you," said {helper.he} to {hero}.',
    '[obstacle=tunnel] "I have a lamp," said {helper}, and they walked through the tunnel side by side.',
    '[obstacle=tunnel] {helper} had a bright lamp. "Follow my light," said {helper.he} to {hero}.',
    '[obstacle=hole] "I have a rope," said {helper}, and {helper.he} pulled {hero} out of the hole.',
    '[obstacle=hole] {helper} had a strong rope. "Hold on tight!" said {helper.he} to {hero}.',
    '[obstacle=snow] "I have a sled," said {helper}, and they slid over the snow together.',
    '[obstacle=snow] {helper} had a wooden sled. "Sit behind me," said {helper.he} to {hero}.',
    '[obstacle=storm] "I have a tent," said {helper}, and they waited for the sun together.',
    '[obstacle=storm] {helper} had a big tent. "Come in out of the rain," said {helper.he} to {hero}.',
)
