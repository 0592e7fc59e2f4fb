"""Everyday sentences that people may send to a model that knows only scenes, in various spellings.

A tiny model answers everything outside its training with one sentence that names the questions it can answer. It
therefore sees such inputs in training: sentences built from the lists below, words in random order, strings that are no
words, and empty prompts. `everyday_held_out.txt` contains 300 sentences for the evaluation, written by someone who had
not seen these lists; `draw` rejects them, so none can be drawn here.

>>> rewrite("What color is the circle?", british=True, case="lower", mark=False)
'what colour is the circle'
"""

import re
from functools import cache
from pathlib import Path

import numpy as np

HELD_OUT = Path(__file__).with_name("everyday_held_out.txt")
BRITISH = {"color": "colour", "center": "centre"}
CASES = {"as is": str, "lower": str.lower, "upper": str.upper, "title": str.title}

SENTENCES = (
    "hi", "hey you", "hi there", "hey, what's new", "good day", "good night", "welcome", "howdy", "bye",
    "have a nice day", "thanks for your help", "thx", "please", "sorry", "okay then", "sure", "right", "wrong",
    "great", "nice one", "well done", "bad answer", "hmm", "lol", "how", "when", "who", "where", "which", "which one",
    "where?", "are you there", "are you awake", "are you a human being", "are you intelligent", "are you happy today",
    "are you an AI", "can you see anything", "can you speak", "can you think", "can you read", "can you count to ten",
    "do you know me", "do you understand me", "do you like music", "do you dream", "do you have a name",
    "who is there", "who is this", "who wrote you", "who are your parents", "what is this", "what is that",
    "what are you doing", "what can you do", "what do you know", "what do you see", "what do you think",
    "what do you mean", "what happened", "what happens next", "what is the matter", "what is the meaning of life",
    "what is your job", "what is your purpose", "what is special about it", "what should I ask",
    "what should I do now", "what else", "what kind of thing is it", "how are you", "how are you doing",
    "how do you do", "how does it work", "how old is it", "how big is it", "how far is it", "how much does it cost",
    "how many cats can you count", "how many words do you know", "how can I use you", "how do I start",
    "how do I get home", "how is the weather", "why is it so", "why not", "why are you here", "why is the sky blue",
    "when does the train leave", "when is my birthday", "when did it happen", "where are you", "where am I",
    "where are my keys", "where is everybody", "where was it taken", "where can I buy it", "which is better",
    "which one do you like", "which language is it", "which year is it", "is it a photo", "is it raining",
    "is it beautiful", "is there a house", "is there anybody", "is this real", "is this art", "is that true",
    "is the glass half full", "does it look good", "does it hurt", "did you see that", "will it rain tomorrow",
    "would you help me", "could you be more precise", "could you look again", "should I stay", "may I ask something",
    "shall we begin", "am I right", "I am tired", "I am hungry", "I love you", "I like it", "I don't like it",
    "I don't understand", "I can't see anything", "I have a question", "I need an answer", "I want to learn",
    "I think you are wrong", "I wonder what it is", "my name is Anna", "my head hurts", "my dog ate my homework",
    "you are funny", "you are wrong", "you look nice", "it is late", "it is nothing", "it looks like a map",
    "that is interesting", "that makes no sense", "this is a test", "this is boring", "just a moment", "just testing",
    "wait", "go", "go away", "more", "more please", "another one", "once more", "repeat", "repeat after me",
    "help please", "help me out", "tell me more", "tell me everything", "tell me a story", "tell me about yourself",
    "tell me what you see", "tell me the truth", "tell me what to do", "say cheese", "say it again", "show me more",
    "show me the way", "give me a hint", "give me an example", "give me five", "give me the details", "guess",
    "guess who", "look", "look closely", "look at this", "listen", "think", "think step by step",
    "answer the question", "answer in one word", "be kind", "start", "begin", "end", "quit", "reset",
    "testing one two three", "one", "two plus two", "1 + 1", "2 + 3 = ?", "3 times 7", "12345", "0", "42", "x = y",
    "?", "??", "!", ".", "...", ", ,", "-", ":)", "a", "b", "abc", "asdf", "qwerty", "aaa", "foo bar",
    "lorem ipsum dolor sit amet", "print('hello')", "import torch", "SELECT * FROM table", "bonjour",
    "comment allez-vous", "qu'est-ce que c'est", "guten Abend", "was siehst du", "wie heißt du", "wo bin ich", "hola",
    "que es esto", "como estas", "ciao", "grazie", "write a song", "write a letter to my boss", "write some code",
    "write a story about a king", "sing for me", "draw me a sheep", "paint a tree", "play chess", "make me laugh",
    "make a list", "cook dinner", "read the text", "read this aloud", "read what it says", "translate it into French",
    "translate this sentence", "spell your name", "sort these numbers", "solve this", "calculate the area",
    "compare the two", "find the cat", "find the difference", "find all the faces", "find my phone",
    "name three fruits", "name the artist", "name the capital of Spain", "list everything",
    "list the objects by size", "open the door", "close the window", "turn around", "turn off the light", "zoom out",
    "crop it", "rotate it by ninety degrees", "make it brighter", "change the background", "remove the noise",
    "save it", "send it to me", "print it", "delete all", "who won the game", "who is the president",
    "who is the woman on the left", "who painted it", "what is love", "what is a neural network", "what is attention",
    "what is the square root of nine", "what is the price of bread", "what is the news", "what is the best film",
    "what is the capital of Italy", "what is the title", "what is behind it", "what is the man doing",
    "what is the woman wearing", "what is on the table", "what is written there", "what is the dog's name",
    "what is for lunch", "what does it mean", "what does it say", "what does she want", "what did I ask",
    "what would you do", "what makes you happy", "what brand is the car", "what breed is the dog",
    "what season is it", "what style is this", "which animal is it", "which team is winning", "which bird is singing",
    "which model are you", "which version is this", "which country is it from", "is this a toy",
    "is anything missing", "is anyone there", "is the man happy", "is the road wet", "is the water cold",
    "is the food fresh", "is it safe to eat", "is he tall", "is she reading a book", "are they friends",
    "are there any animals", "are there any cars in the street", "are there clouds", "are there people",
    "has it been edited", "have you seen it before", "have you eaten", "had you noticed", "was it you",
    "were you trained on this",
)  # fmt: skip
VERBS = (
    "describe", "explain", "summarize", "summarise", "caption", "analyze", "analyse", "interpret", "classify",
    "label", "rate", "review", "discuss", "comment on", "talk about", "write about", "tell me about",
    "give me a caption for", "give a short summary of", "say something about", "look at", "think about", "improve",
    "what do you think of", "what can you say about", "how would you describe", "can you describe",
    "could you explain", "please describe", "please summarize", "do you like", "who made", "where does one find",
)  # fmt: skip
MEDIA = (
    "this", "it", "this picture", "the picture", "that picture", "this image", "this photo", "the photograph",
    "my photo", "this clip", "the clip", "this video", "the video", "the scene", "this scene", "what you see",
    "the whole thing", "the content", "the shapes", "the objects", "the drawing", "this frame", "the screenshot",
    "the figure",
)  # fmt: skip
MANNERS = (
    "", "", "", "", " in detail", " briefly", " in one sentence", " in your own words", " for a child", " for me",
    " please", " now", " in ten words", " in German",
)  # fmt: skip
NOUNS = (
    "dog", "cat", "car", "house", "tree", "man", "woman", "child", "person", "sun", "moon", "sky", "sea", "river",
    "road", "bird", "horse", "table", "chair", "cup", "book", "hat", "shirt", "ball", "bus", "train", "plane", "boat",
    "flower", "apple", "bread", "cake", "phone", "computer", "clock", "door", "window", "face", "hand", "nose",
    "king", "queen", "robot", "dragon", "ghost", "city", "mountain", "lake", "garden", "street", "shop", "school",
    "teacher", "doctor", "player", "logo", "text", "title", "sign", "number", "letter", "word", "line", "arrow",
    "rectangle", "oval", "hexagon", "diamond", "heart", "cube", "sphere", "pixel", "frame", "background", "corner",
    "edge", "shadow", "light",
)  # fmt: skip
ABOUT_NOUNS = (
    "what color is the {x}", "what is the color of the {x}", "which color does the {x} have", "what shape is the {x}",
    "what is the shape of the {x}", "where is the {x}", "where can you see the {x}", "in which place is the {x}",
    "which way does the {x} move", "in which direction does the {x} move", "where does the {x} go",
    "which row is the {x} in", "is there a {x}", "do you see a {x}", "can you see the {x}", "how many {x}s are there",
    "what is the {x} doing", "who owns the {x}", "how big is the {x}", "is the {x} red", "why is the {x} there",
    "find the {x}", "show me the {x}", "describe the {x}", "what is a {x}", "tell me about the {x}", "draw a {x}",
    "the {x}", "a {x}", "{x}", "how old is the {x}", "what is behind the {x}", "what is next to the {x}",
    "when does the {x} change", "the {x} is nice", "I like the {x}", "do you like the {x}", "remove the {x}",
    "which {x} is it", "does the {x} look happy", "what kind of {x} is it",
)  # fmt: skip
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"


def normal(text: str) -> str:
    """Return a text without case, punctuation and repeated spaces; equal results mean the same sentence."""
    return " ".join(re.findall(r"\w+", text.lower())) or text.strip()


@cache
def held_out() -> tuple[str, ...]:
    """Return the sentences for the evaluation, as written."""
    return tuple(HELD_OUT.read_text().splitlines())


@cache
def _forbidden() -> frozenset[str]:
    return frozenset(map(normal, held_out()))


@cache
def words() -> tuple[str, ...]:
    """Return every word of the lists, sorted."""
    texts = (*SENTENCES, *VERBS, *MEDIA, *MANNERS, *NOUNS, *ABOUT_NOUNS)
    return tuple(sorted({word for text in texts for word in normal(text.replace("{x}", "")).split()}))


def tokenizer_texts() -> list[str]:
    """Return texts from which a tokenizer learns everyday words: common ones become tokens, rare ones pieces."""
    return [*SENTENCES, *VERBS, *MEDIA, *(text.format(x="dog") for text in ABOUT_NOUNS)]


def draw(rng: np.random.Generator) -> str:
    """Draw a sentence that no scene answers and that is not in the evaluation."""
    while True:
        sort = rng.random()
        if sort < 0.04:
            return ""
        if sort < 0.36:
            text = _pick(rng, SENTENCES)
        elif sort < 0.56:
            text = _pick(rng, VERBS) + " " + _pick(rng, MEDIA) + _pick(rng, MANNERS)
        elif sort < 0.80:
            noun = _pick(rng, NOUNS) if rng.random() < 0.8 else _no_word(rng)
            text = _pick(rng, ABOUT_NOUNS).format(x=noun)
        elif sort < 0.93:
            text = " ".join(_pick(rng, words()) for _ in range(rng.integers(1, 15)))
        else:
            text = " ".join(_no_word(rng) for _ in range(rng.integers(1, 7)))
        text = _punctuate(rng, text)
        if normal(text) not in _forbidden():
            return text


def vary(text: str, rng: np.random.Generator) -> str:
    """Vary a question's spelling half of the time: British or American, in any case, with or without question mark."""
    if rng.random() < 0.5:
        return text
    return rewrite(text, british=rng.random() < 0.5, case=_pick(rng, tuple(CASES)), mark=rng.random() < 0.5)


def respell(text: str, rng: np.random.Generator) -> str:
    """Vary the spelling of an evaluation question: British or American, in any case, mostly without question mark."""
    british, case = bool(rng.random() < 0.5), str(rng.choice(list(CASES)))
    return rewrite(text, british=british, case=case, mark=bool(rng.random() < 0.3))


def rewrite(text: str, *, british: bool = False, case: str = "as is", mark: bool = True) -> str:
    """Return a text in a different spelling. case: one of `CASES`; mark: whether to keep the question mark."""
    for american, spelling in BRITISH.items() if british else ():
        text = text.replace(american, spelling)
    return CASES[case](text if mark else text.rstrip("?"))


def _punctuate(rng: np.random.Generator, text: str) -> str:
    """Vary the capital letters and the ending of a text."""
    how = rng.random()
    text = text[:1].upper() + text[1:] if how < 0.5 else text.upper() if how > 0.92 else text
    ending = _pick(rng, ("", "", "?", "?", ".", ".", "!", " please", "..."))
    return text if text[-1:] in ".?!" else text + ending


def _no_word(rng: np.random.Generator) -> str:
    letters = (_pick(rng, CONSONANTS if rng.random() < 0.6 else VOWELS) for _ in range(rng.integers(2, 10)))
    return "".join(letters)


def _pick(rng: np.random.Generator, choices):
    return choices[int(rng.integers(len(choices)))]
