"""The grammar of the demo model: short animal stories, asked for and talked about in chat form."""

from __future__ import annotations

from grammar import Grammar

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def turn(role: str, content: str) -> str:
    """One message in the chat form (ChatML)."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def exchange(question: str, answer: str) -> str:
    """A user's message and the assistant's answer."""
    return turn("user", question) + turn("assistant", answer)


def words(text: str) -> list[str]:
    """The words of a text, as alternatives of a rule."""
    return text.split()


VARIABLES = {
    "hero": "animals",
    "friend": "animals",
    "elder": "animals",
    "name": "names",
    "trait": "traits",
    "place": "places",
    "moral": "morals",
    "thing": "things",
    "food": "foods",
    "skill": "skills",
}

CONVERSATIONS = {
    # Training texts are mostly conversations; some are bare stories, so that plain text can be continued too.
    "text": ["{conversation}"] * 7 + ["{story}"],
    "conversation": ["{system}{first exchange}{follow-ups}"],
    "system": ["", "", turn("system", "{system prompt}")],
    "system prompt": [
        "You are a helpful assistant.",
        "You tell short stories about animals.",
        "You are a friendly storyteller.",
    ],
    "first exchange": ["{story exchange}"] * 4 + ["{greeting exchange}{choice exchange}"],
    "story exchange": [exchange("{request}", "{story}")],
    "greeting exchange": [exchange("{greeting}", "{welcome} Which animal should my story be about?")],
    "choice exchange": [exchange("{animal choice}", "{story}")],
    "follow-ups": ["", "{follow-up}", "{follow-up}{follow-up}"],
    "follow-up": [
        exchange("What was the {hero} called?", "The {hero} was called {name}."),
        exchange("What was {name} like?", "{name} was a {trait} {hero}."),
        exchange("Where did {name} live?", "{name} lived {place}."),
        exchange("Who was the friend of {name}?", "The friend of {name} was a {friend}."),
        exchange("What did {name} learn?", "{name} learned that {moral}."),
        exchange("{thanks}", "You are welcome! I am glad that you liked the story of {name} the {hero}."),
    ],
    "greeting": ["Hello!", "Hi!", "Hello", "Hi", "hello", "hi", "Good morning!", "Good evening!", "How are you?"],
    "welcome": [
        "Hello! I am happy to see you.",
        "Hello! It is a good day for a story.",
        "Hello! I like to tell stories.",
    ],
    "thanks": ["Thank you!", "Thanks!", "Thank you, that was a nice story."],
    "request": [
        "Tell me a story.",
        "Tell me a story about {subject}.",
        "Tell me a story about {subject}.",
        "Please tell me a story about {subject}.",
        "Tell me a short story about {subject}, please.",
        "Can you tell me a story about {subject}?",
        "I would like a story about {subject}.",
        "Write a story about {subject}.",
    ],
    "subject": ["a {hero}", "a {hero}", "a {trait} {hero}", "a {hero} and a {friend}", "a {hero} called {name}"],
    "animal choice": ["A {hero}.", "A {hero}, please.", "A {hero}, please!", "A story about a {hero}, please."],
}

STORIES = {
    "story": ["{opening}\n\n{plot}\n\n{ending}"],
    "opening": [
        "Once upon a time, there was a {trait} {hero} called {name}. {name} lived {place}.",
        "Once upon a time, a {trait} {hero} called {name} lived {place}.",
        "Long ago, there was a {trait} {hero} who lived {place}. The {hero} was called {name}.",
        "There once was a {trait} {hero} called {name}, who lived {place} and loved {pastime}.",
        "There once was a {hero} called {name}, and no other {hero} was so {trait}. {name} lived {place}.",
        "Once upon a time, a {trait} {hero} lived {place}. {name} was the name of the {hero}, {detail}.",
    ],
    "detail": [
        "and everybody knew the {colour} {garment} that {name} wore",
        "who always wore a {colour} {garment}",
        "and there was nothing that {name} loved more than {pastime}",
    ],
    "plot": ["{kindness}", "{courage}", "{honesty}", "{sharing}", "{patience}", "{pride}", "{asking}", "{music}"],
    "ending": [
        "From that day on, {name} and the {friend} were the best of friends.",
        "From that day on, {name} and the {friend} met every {part of day}, and they lived happily ever after.",
        "That night, {name} looked up at the {sky} and smiled. Now {name} knew that {moral}.",
        "{name} and the {friend} never forgot that day, and they always remembered that {moral}.",
        'When the old {elder} heard of it, the {elder} said, "You have learned that {moral}."',
    ],
    "one day": [
        "One day",
        "One {weather} {part of day}",
        "Early one {weather} {part of day}",
        "One {part of day} in {season}",
    ],
    # Somebody needs help, and the hero stops.
    "kindness": [
        "{one day}, {name} met a {friend} who {trouble and rescue} {thankful words} "
        "It was only a small thing, but {name} saw that {moral=morals of kindness}."
    ],
    "trouble and rescue": [
        "was stuck in the mud. {name} found a long branch, held it out and pulled until the {friend} was free.",
        "was lost in the fog. {name} lit a little lantern and led the {friend} all the way home.",
        "was cold and hungry. {name} made a warm fire and shared a big pot of {food} soup.",
        "had fallen into the river. {name} threw a rope into the water and pulled the {friend} back to the shore.",
    ],
    "thankful words": [
        '"Thank you!" said the {friend}. "Nobody else stopped to help me."',
        '"How can I ever thank you?" asked the {friend}. "Just help the next one," said {name}.',
        '"You are so kind," said the {friend}, and gave {name} {thing}.',
    ],
    # Danger, and the hero is afraid but goes.
    "courage": [
        "{one day}, {danger} All the animals ran away to hide, but a little {friend} was still out there. "
        "{name} was afraid too. Still, {name} took a deep breath and {brave deed}, and soon the {friend} was safe. "
        "{brave words} After that, {name} understood that {moral=morals of courage}."
    ],
    "danger": [
        "a terrible storm came over the hills.",
        "the river rose higher and higher.",
        "a loud noise came out of the dark cave.",
        "thick smoke rose from the old mill.",
        "a {colour} light was seen on the hill, and nobody knew what it was.",
    ],
    "brave deed": ["ran back", "walked into the dark", "climbed over the rocks", "called out into the wind"],
    "brave words": [
        '"You came for me!" cried the {friend}.',
        '"Were you not afraid?" asked the {friend}. "I was," said {name}, "but you needed me."',
        "The {friend} held on to {name} and would not let go.",
    ],
    # The hero breaks something, and says so.
    "honesty": [
        "{one day}, {name} was playing and broke {thing} that belonged to a {friend}. Nobody had seen it. "
        "{name} {hesitation}, but then went to the {friend} and told the truth. {forgiving words} "
        "Together they mended it, and {name} felt that {moral=morals of honesty}."
    ],
    "hesitation": ["wanted to run away", "thought about it all night", "hid behind a tree for a while"],
    "forgiving words": [
        '"I am sorry," said {name}. "I am not angry," said the {friend}. "Thank you for telling me."',
        '"It was me," said {name} in a small voice. The {friend} smiled. "That was brave of you to say."',
    ],
    # Little food, and the hero gives half of it away.
    "sharing": [
        "{season start}, {name} had only one small {food} cake left. Then a {friend} knocked at the door. "
        '"{begging words}" asked the {friend}. {name} {sharing deed}. {later reward} '
        "So {name} found out that {moral=morals of sharing}."
    ],
    "season start": ["That winter", "When the first snow fell", "After a long dry summer"],
    "begging words": ["May I have something to eat?", "Do you have any food for me?", "Could I come in and rest?"],
    "sharing deed": [
        "looked at the cake, and then gave half of it to the {friend}",
        "opened the door and put two plates on the table",
        "said nothing, but cut the last piece in two",
    ],
    "later reward": [
        "In spring, the {friend} came back with a cart full of {food} cakes, enough for them both.",
        "The next day there was {thing} in front of the door, with a note from the {friend}.",
        "They ate by the fire and told stories until morning, and it was the best meal of the year.",
    ],
    # Something good takes its time.
    "patience": [
        "{one day}, {name} {slow start}. Every day {name} looked, but nothing seemed to happen. "
        '"{giving up}" said {name}. "Wait a little longer," said a {friend} who came by. '
        "{slow success} Then {name} saw that {moral=morals of patience}."
    ],
    "slow start": [
        "planted a tiny seed behind the house",
        "began to build a boat from old wood",
        "started to dig a well in the dry ground",
        "wanted to grow the biggest {food} in the land",
    ],
    "giving up": ["This will never work!", "It is no use!", "I want to stop,"],
    "slow success": [
        "So they went on together, and one {part of day} the work was done.",
        "Weeks went by, and at last they stood there and could not believe their eyes.",
        "The {season} came and went, and then, one {weather} {part of day}, there it was, finer than in any dream.",
    ],
    # A race that is lost, or almost.
    "pride": [
        '{one day}, {name} said to everyone, "{boast}" A {friend} heard this and asked for a race. '
        "{name} laughed and {careless deed}. But the {friend} went on, step by step, and reached the {goal} first. "
        '{name} was quiet for a while and then said, "Well done!" '
        "That is how {name} learned that {moral=morals of pride}."
    ],
    "boast": ["Nobody is as fast as I am!", "I am the best of all animals!", "I have never lost a race!"],
    "careless deed": [
        "lay down to sleep in the sun",
        "stopped for a piece of {food} pie",
        "went for a swim in the lake",
    ],
    "goal": ["old bridge", "tall tree", "top of the hill", "garden gate"],
    # Two can do what one cannot.
    "asking": [
        "{one day}, {name} wanted to {big task}. {name} tried once, and tried again, but it was too hard alone. "
        "{name} did not like to ask for help. In the end, a {friend} came along. {offer} "
        "They worked side by side, and before sunset it was done. "
        "{name} laughed and said that {moral=morals of asking}."
    ],
    "big task": [
        "move a heavy stone from the path",
        "carry a great pumpkin home",
        "repair the roof before the rain came",
        "cross the wide river",
    ],
    "offer": [
        '"Shall we try it together?" asked the {friend}.',
        '"Four hands are better than two," said the {friend}.',
        '"Would you help me?" asked {name} at last. "Of course!" said the {friend}.',
    ],
    # Practice.
    "music": [
        "{name} wanted to learn to {skill}, but the {others} only laughed. {one day}, a {friend} heard {name} "
        'practising alone. "{encouragement}" said the {friend}. So {name} practised every {part of day}, '
        "and when the {feast} came, {name} could {skill} better than anyone. All the animals clapped, "
        "and {name} knew that {moral=morals of practice}."
    ],
    "encouragement": ["Do not give up!", "Try once more!", "I like it. Let me hear it again!"],
    "others": ["others", "neighbours", "older animals"],
    "feast": ["summer feast", "harvest feast", "feast of lights"],
}

MORALS = {
    "morals of kindness": ["a kind heart is worth more than gold", "helping others makes everyone happy"],
    "morals of courage": ["being brave means going on when you are afraid", "even the smallest can be brave"],
    "morals of honesty": ["the truth makes the heart light", "it is always better to tell the truth"],
    "morals of sharing": ["what we share tastes twice as good", "the more you give, the more you have"],
    "morals of patience": ["good things take time", "those who wait are rewarded"],
    "morals of pride": ["slow and steady wins the race", "nobody should laugh at others"],
    "morals of asking": ["nobody has to do everything alone", "together we are strong"],
    "morals of practice": ["nobody is born a master", "those who keep trying get better every day"],
}

WORDS = {
    "animals": words(
        "fox rabbit bear mouse badger beaver frog duck deer wolf turtle goat cat dog hen pony crow lamb mole robin "
        "swan squirrel hedgehog sparrow"
    ),
    "names": words(
        "Rusty Molly Pip Hazel Bruno Daisy Finn Luna Oscar Rosie Toby Willow Max Clover Benny Ruby Jasper Poppy Sam "
        "Nora Leo Tilly Hugo Pearl"
    ),
    "traits": words("brave clever curious gentle cheerful shy quiet kind proud merry lonely little friendly lazy"),
    "places": [
        "in a green forest",
        "in a hollow tree",
        "in a small village",
        "in a sunny valley",
        "by a silver lake",
        "by the wide sea",
        "near an old mill",
        "under a stone bridge",
        "on a snowy mountain",
        "on a farm full of flowers",
        "at the edge of a meadow",
        "behind a red barn",
    ],
    "pastime": [
        "to sing",
        "to swim in the pond",
        "to watch the clouds",
        "to pick berries",
        "long walks in the rain",
        "the smell of fresh bread",
    ],
    "things": ["a glass lantern", "a silver bell", "a wooden flute", "a marble", "a golden key", "a painted cup"],
    "foods": ["carrot", "apple", "mushroom", "pumpkin", "cherry", "potato"],
    "colour": ["red", "yellow", "green", "blue", "purple", "white"],
    "garment": ["scarf", "hat", "coat", "ribbon"],
    "skills": ["play the flute", "dance", "sing", "paint", "whistle", "juggle"],
    "weather": ["sunny", "rainy", "windy", "foggy", "cold", "warm"],
    "part of day": ["morning", "afternoon", "evening"],
    "season": ["spring", "summer", "autumn", "winter"],
    "sky": ["stars", "moon", "clear night sky"],
}

STORY_GRAMMAR = Grammar({**CONVERSATIONS, **STORIES, **MORALS, **WORDS}, VARIABLES)
