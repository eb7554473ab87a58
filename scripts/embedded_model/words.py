"""The words and facts that conversations are made of."""

from __future__ import annotations

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Japan": "Tokyo", "China": "Beijing",
    "India": "Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Brazil": "Brasilia", "Chile": "Santiago", "Peru": "Lima", "Canada": "Ottawa",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna",
    "Greece": "Athens", "Turkey": "Ankara", "Ireland": "Dublin", "Cuba": "Havana", "Thailand": "Bangkok", "Vietnam": "Hanoi",
}  # fmt: skip
TERMS = {
    "a token": "A token is a small piece of text, such as a word or a part of one, that a model reads or writes.",
    "a KV cache": "A KV cache keeps the keys and values of past tokens, so the model does not compute them again at every step.",
    "continuous batching": "Continuous batching lets new requests join a running batch, and finished ones leave it, at every step.",
    "a mixture of experts": "A mixture of experts has many small networks, and a router picks a few of them for each token.",
    "a router": "A router is a small layer that scores the experts and sends each token to the best ones.",
    "an expert": "An expert is one of the small networks in a layer; each token uses only a few of them.",
    "prefill": "Prefill is the part of the work in which the model reads the whole prompt.",
    "decode": "Decode is the part of the work in which the model writes one new token at each step.",
    "a prefix cache": "A prefix cache keeps the pages of prompts that were read before, so an equal beginning costs nothing.",
    "temperature": "Temperature sets how random the next token is. A low value is steady, and a high value is varied.",
    "top-p sampling": "Top-p sampling picks the next token from the smallest set whose probabilities add up to p.",
    "a TPU": "A TPU is a chip made for large matrix products, which are most of the work of a neural network.",
    "quantization": "Quantization stores weights with fewer bits, so a model needs less memory and less bandwidth.",
    "a page": "A page is a fixed number of tokens in the KV cache; sequences take and give back whole pages.",
    "a stop string": "A stop string ends the answer as soon as the text contains it.",
    "streaming": "Streaming sends each piece of the answer as soon as it is there.",
}
COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "a ripe tomato": "red", "an orange": "orange",
    "a carrot": "orange", "milk": "white", "the sea": "blue",
}  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("light", "dark"), ("early", "late"), ("open", "closed"), ("happy", "sad"),
    ("hard", "soft"), ("high", "low"), ("new", "old"), ("full", "empty"), ("wet", "dry"), ("strong", "weak"), ("loud", "quiet"),
    ("near", "far"), ("rich", "poor"),
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "duck": "quacks",
    "cow": "moos",
    "lion": "roars",
    "owl": "hoots",
    "bee": "buzzes",
}
LEGS = {"dog": 4, "cat": 4, "bird": 2, "spider": 8, "ant": 6, "horse": 4, "hen": 2, "bee": 6}

NAMES = (
    "Anna", "Ben", "Clara", "David", "Ella", "Finn", "Grace", "Hugo", "Iris", "Jack", "Lily", "Max", "Nora", "Oscar", "Rosa", "Sam", "Tom",
    "Vera", "Adam", "Bella", "Carl", "Dora", "Emil", "Freya", "George", "Hanna", "Ivan", "Julia", "Karl", "Lena", "Mia", "Noah", "Olga", "Paul",
    "Quinn", "Ruth", "Simon", "Tina", "Uma", "Victor", "Wanda", "Yara", "Zoe", "Alma", "Bruno", "Cora", "Dan", "Eva", "Felix", "Gina",
)  # fmt: skip
ANIMALS = (
    "fox", "bear", "owl", "rabbit", "mouse", "cat", "dog", "frog", "turtle", "hen", "duck", "goat", "horse", "wolf", "otter",
)  # fmt: skip
PLACES = ("forest", "village", "river", "garden", "hill", "lake", "barn", "meadow", "market", "harbor")
THINGS = ("lantern", "basket", "key", "drum", "letter", "map", "coat", "boat", "kite", "bell", "ladder", "lamp")
MOODS = ("tired", "curious", "hungry", "brave", "lonely", "cheerful", "careful", "proud")
SKIES = ("sunny", "rainy", "windy", "cloudy", "snowy")
FRUIT = ("apples", "pears", "plums", "lemons", "cherries", "grapes")
COLOR_NAMES = ("red", "blue", "green", "yellow", "white", "black")

TOPICS = (
    "the moon", "football", "the stock market", "my taxes", "a car engine", "the French Revolution", "quantum physics", "my back pain", "jazz",
    "a good movie", "the price of gold", "black holes", "knitting", "the human heart", "the law", "chess openings", "photosynthesis", "the weather on Mars",
    "the Roman Empire", "cooking pasta", "my homework", "an electric guitar", "the theory of evolution", "volcanoes", "the president", "the best phone",
    "a broken window", "the history of bread", "dinosaurs", "a plane crash", "my dreams", "cancer", "the internet", "the meaning of life", "poker",
    "the deep sea", "the Vikings", "yoga", "the latest news", "opera", "my new job", "insurance", "the brain", "hurricanes", "an old castle", "rockets",
    "perfume", "baseball", "the pyramids", "diamonds", "bridges", "bacteria", "politics", "marathon training", "coffee machines", "gravity", "ballet",
    "the ice age", "solar panels", "a passport", "whales", "printing", "the lottery", "tea", "ancient coins", "windmills", "tennis", "the economy",
)  # fmt: skip
UNKNOWN_TOPICS = (
    "the sun", "basketball", "bitcoin", "my rent", "a steam train", "the Middle Ages", "chemistry", "my headache", "rock music", "a good book",
    "the price of oil", "comets", "painting", "the human eye", "contracts", "card games", "earthquakes", "the Greek gods", "baking a cake",
    "a trumpet", "the moon landing", "sharks", "the king", "a broken chair", "cheese",
)  # fmt: skip
VERBS = ("build", "repair", "sell", "paint", "grow", "buy", "draw", "clean", "design", "move", "cook", "measure")
OBJECTS = (
    "a house", "a bicycle", "a garden wall", "a wooden table", "a ship", "a robot", "a fence", "an old clock", "a computer", "a violin", "roses",
    "a swimming pool", "a roof", "a tractor", "a piano", "bread",
)  # fmt: skip
PEOPLE = (
    "Shakespeare", "Napoleon", "Mozart", "Einstein", "Cleopatra", "Picasso", "Newton", "Columbus", "Darwin", "Beethoven", "Galileo", "Plato",
)  # fmt: skip
BEYOND = "That is beyond me: I am a very small model. Ask me about capitals, small sums, serving terms, or for a story."
WHO = "I am a very small mixture-of-experts model that comes with tpu-serve and shows what the server does."
