"""The grammar of the demo student: meanings, and the English and Turkish sentences that express each of them.

A `Meaning` is a choice of concepts (who did what to which thing, where and when). `paraphrase` words it in one of
two languages, choosing among sentence patterns and synonyms.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

from turkish import capitalize, noun_form

LANGUAGES = ("en", "tr")


@dataclass(frozen=True)
class Concept:
    """What one slot of a meaning holds: its synonyms in each language."""

    en: tuple[str, ...]
    tr: tuple[str, ...]


def concepts(table: str) -> tuple[Concept, ...]:
    """Reads lines of `Turkish synonyms = English synonyms`, synonyms separated by commas."""
    rows = [line.partition("=") for line in table.strip().splitlines()]
    return tuple(Concept(en=_synonyms(english), tr=_synonyms(turkish)) for turkish, _, english in rows)


def _synonyms(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


PEOPLE = concepts("""
annem = my mother, my mum
babam = my father, my dad
dedem, büyükbabam = my grandfather, my grandpa
ninem, büyükannem = my grandmother, my grandma
ablam = my older sister, my big sister
ağabeyim, abim = my older brother, my big brother
kuzenim = my cousin
arkadaşım = my friend, my pal
öğretmen, hoca = the teacher, the schoolteacher
doktor, hekim = the doctor, the physician
komşu = the neighbour, the man next door
müdür, patron = the manager, the boss
çocuk = the child, the kid
kadın, hanım = the woman, the lady
adam, bey = the man, the gentleman
postacı = the postman, the mail carrier
aşçı = the cook, the chef
terzi = the tailor
çiftçi = the farmer
balıkçı = the fisherman
bahçıvan = the gardener
marangoz = the carpenter
ressam = the painter, the artist
şarkıcı = the singer
öğrenci, talebe = the student, the pupil
polis = the police officer, the policeman
hırsız = the thief, the burglar
turist, gezgin = the tourist, the traveller
kaptan = the captain, the skipper
şoför, sürücü = the driver
garson = the waiter
gazeteci, muhabir = the journalist, the reporter
avukat = the lawyer, the attorney
mühendis = the engineer
berber, kuaför = the barber, the hairdresser
kraliçe = the queen
kral, hükümdar = the king, the ruler
asker, er = the soldier
hemşire = the nurse
yazar = the writer, the author
""")

# Past tense / passive (Turkish); past tense / participle (English).
ACTIONS = concepts("""
aldı/alındı, satın aldı/satın alındı = bought/bought, purchased/purchased
sattı/satıldı = sold/sold
buldu/bulundu, keşfetti/keşfedildi = found/found, discovered/discovered
kaybetti/kaybedildi, yitirdi/yitirildi = lost/lost, misplaced/misplaced
kırdı/kırıldı, parçaladı/parçalandı = broke/broken, smashed/smashed
onardı/onarıldı, tamir etti/tamir edildi = repaired/repaired, fixed/fixed
gördü/görüldü, fark etti/fark edildi = saw/seen, noticed/noticed
getirdi/getirildi = brought/brought
sakladı/saklandı, gizledi/gizlendi = hid/hidden, concealed/concealed
boyadı/boyandı = painted/painted, coloured/coloured
temizledi/temizlendi = cleaned/cleaned
yıkadı/yıkandı = washed/washed, rinsed/rinsed
taşıdı/taşındı = carried/carried
unuttu/unutuldu = forgot/forgotten, left behind/left behind
çizdi/çizildi = drew/drawn, sketched/sketched
çaldı/çalındı = stole/stolen
seçti/seçildi = chose/chosen, picked/picked
gösterdi/gösterildi = showed/shown, presented/presented
ödünç aldı/ödünç alındı = borrowed/borrowed
gönderdi/gönderildi, yolladı/yollandı = sent/sent, dispatched/dispatched
istedi/istendi = wanted/wanted, wished for/wished for
beğendi/beğenildi, sevdi/sevildi = liked/liked, loved/loved
attı/atıldı = threw away/thrown away, discarded/discarded
aradı/arandı = looked for/looked for, searched for/searched for
inceledi/incelendi, kontrol etti/kontrol edildi = checked/checked, inspected/inspected
sipariş etti/sipariş edildi, ısmarladı/ısmarlandı = ordered/ordered
ölçtü/ölçüldü = measured/measured
kaldırdı/kaldırıldı = lifted/lifted, picked up/picked up
övdü/övüldü, methetti/methedildi = praised/praised
eleştirdi/eleştirildi = criticized/criticized
paketledi/paketlendi, sardı/sarıldı = packed/packed, wrapped/wrapped
korudu/korundu = protected/protected, guarded/guarded
""")

THINGS = concepts("""
araba, otomobil = car, automobile
bisiklet = bicycle, bike
kitap(b) = book
defter = notebook
kalem = pen
kalemtıraş = pencil sharpener
çanta = bag, handbag
bavul, valiz = suitcase
cüzdan = wallet
anahtar = key
telefon = phone, telephone
bilgisayar = computer
televizyon = television
radyo = radio
fotoğraf = photograph, photo
tablo = painting, picture
masa = table
sandalye, iskemle = chair
koltuk(ğ) = armchair
yatak(ğ) = bed
yastık(ğ) = pillow, cushion
battaniye = blanket
halı, kilim = carpet, rug
perde = curtain
lamba = lamp
ayna = mirror
dolap(b) = cupboard, wardrobe
kapı = door
pencere = window
duvar = wall
merdiven = ladder
süpürge = broom
kova = bucket, pail
çekiç(c) = hammer
iğne = needle
ip = rope
bıçak(ğ) = knife
çatal = fork
kaşık(ğ) = spoon
tabak(ğ) = plate, dish
bardak(ğ) = glass
fincan = cup
tencere = saucepan, pot
tava = frying pan
şişe = bottle
kutu = box
sepet = basket
gömlek(ğ) = shirt
ceket = jacket
palto = coat, overcoat
elbise = dress
etek(ğ) = skirt
kazak(ğ) = sweater, jumper
şapka = hat
eldiven = glove
ayakkabı = shoe
çizme = boot
terlik(ğ) = slipper
kemer = belt
şemsiye = umbrella
mendil = handkerchief
yüzük(ğ) = ring
kolye, gerdanlık(ğ) = necklace
bilezik(ğ) = bracelet
elma = apple
armut(d) = pear
portakal = orange
limon = lemon
kavun = melon
karpuz = watermelon
ekmek(ğ), somun = bread, loaf
peynir = cheese
pasta = cake
çorba = soup
çikolata = chocolate
reçel = jam, marmalade
bal = honey
süt = milk
çay = tea
kahve = coffee
yumurta = egg
balık(ğ) = fish
tavuk(ğ) = chicken, hen
kedi = cat
köpek(ğ) = dog
kuş = bird
at, beygir = horse
inek(ğ) = cow
koyun = sheep
tavşan = rabbit, hare
çiçek(ğ) = flower
gül = rose
ağaç(c) = tree
mektup(b) = letter
gazete = newspaper, paper
dergi, mecmua = magazine
bilet = ticket
harita = map
pasaport = passport
sözlük(ğ) = dictionary
rapor = report
davetiye = invitation
hediye, armağan = gift, present
gitar = guitar
keman = violin, fiddle
davul = drum
flüt = flute
piyano = piano
top = ball
oyuncak(ğ) = toy
uçurtma = kite
tekne, kayık(ğ) = boat
gemi = ship, vessel
uçak(ğ) = plane, aeroplane
kamera = camera
klavye = keyboard
yazıcı = printer
ev = house
bahçe = garden
çadır = tent
mum = candle
sabun = soap
havlu = towel
tarak(ğ) = comb
fırça = brush
ilaç(c) = medicine
heykel = statue, sculpture
vazo = vase
sandık(ğ) = chest, trunk
bayrak(ğ) = flag
""")

QUALITIES = concepts("""
kırmızı = red, crimson
mavi = blue
yeşil = green
sarı = yellow
siyah, kara = black
beyaz, ak = white
mor = purple, violet
pembe = pink
gri = grey
kahverengi = brown
büyük, kocaman = big, large
küçük, ufak = small, little
yeni = new
eski = old
ucuz = cheap, inexpensive
pahalı = expensive, costly
güzel, hoş = beautiful, pretty
çirkin = ugly
ağır = heavy
hafif = lightweight
temiz = clean
kirli, pis = dirty, filthy
yuvarlak = round
tahta, ahşap = wooden
gümüş = silver
altın = golden, gold
ıslak = wet
sıcak = hot
soğuk = cold
garip, tuhaf = strange, odd
""")

PLACES = concepts("""
pazarda, çarşıda = at the market
parkta = in the park
evde = at home
okulda = at school
hastanede = in the hospital
sokakta, caddede = in the street, on the road
mutfakta = in the kitchen
istasyonda, garda = at the station
limanda = in the harbour, in the port
ormanda, koruda = in the forest, in the woods
köyde = in the village
sahilde, kumsalda = on the beach, by the seaside
müzede = in the museum
kütüphanede = in the library
otelde = at the hotel
lokantada, restoranda = at the restaurant
havaalanında, havalimanında = at the airport
ofiste, büroda = at the office
köprüde = on the bridge
İstanbul'da = in Istanbul
Ankara'da = in Ankara
İzmir'de = in Izmir
Londra'da = in London
Paris'te = in Paris
çatıda, damda = on the roof
bodrumda, kilerde = in the basement, in the cellar
dağda = on the mountain
adada = on the island
tarlada = in the field
trende = on the train
otobüste = on the bus
""")

TIMES = concepts("""
dün = yesterday
bugün = today
bu sabah = this morning
dün gece = last night
geçen hafta = last week
geçen ay = last month
geçen yıl, geçen sene = last year
pazartesi günü = on Monday
salı günü = on Tuesday
çarşamba günü = on Wednesday
perşembe günü = on Thursday
cuma günü = on Friday
cumartesi günü = on Saturday
pazar günü = on Sunday
yazın = in summer
kışın = in winter
ilkbaharda, baharda = in spring
sonbaharda, güzün = in autumn
az önce, demin = just now, a moment ago
uzun zaman önce, çok eskiden = long ago, a long time ago
öğlen = at noon
gece yarısı = at midnight
iki gün önce = two days ago
üç yıl önce, üç sene önce = three years ago
""")

OWNERS = ("", "my", "your", "our")

PATTERNS = {
    ("event", "en"): (
        "{who} {did} {what} {where} {when}.",
        "{when} {who} {did} {what} {where}.",
        "{what} was {done} by {who} {where} {when}.",
        "it was {who} who {did} {what} {where} {when}.",
        "have you heard that {who} {did} {what} {where} {when}?",
    ),
    ("event", "tr"): (
        "{who} {when} {where} {what:accusative} {did}.",
        "{when} {who} {where} {what:accusative} {did}.",
        "{what:nominative} {when} {where} {who} tarafından {done}.",
        "{where} {what:accusative} {when} {who} {did}.",
        "duydun mu, {who} {when} {where} {what:accusative} {did}!",
    ),
    ("search", "en"): (
        "where is {what}?",
        "do you know where {what} is?",
        "I cannot find {what}.",
        "I wonder where {what} could be.",
    ),
    ("search", "tr"): (
        "{what:nominative} nerede?",
        "{what:nominative} nerede, biliyor musun?",
        "{what:accusative} bulamıyorum.",
        "acaba {what:nominative} nerede olabilir?",
    ),
    ("price", "en"): (
        "how much is {what}?",
        "what is the price of {what}?",
        "what does {what} cost?",
        "how much money do you want for {what}?",
    ),
    ("price", "tr"): (
        "{what:nominative} ne kadar?",
        "{what:genitive} fiyatı nedir?",
        "{what:nominative} kaç lira?",
        "{what:dative} kaç para istiyorsun?",
    ),
    ("need", "en"): (
        "I need {what}.",
        "could you bring me {what}?",
        "please give me {what}.",
        "I would like to have {what}, please.",
    ),
    ("need", "tr"): (
        "bana {what:nominative} lazım.",
        "{what:dative} ihtiyacım var.",
        "lütfen {what:accusative} bana ver.",
        "{what:accusative} bana getirir misin?",
    ),
}

SLOTS = {
    "frame": ("event", "event", "event", "search", "price", "need"),
    "who": PEOPLE,
    "action": ACTIONS,
    "owner": OWNERS,
    "quality": QUALITIES,
    "thing": THINGS,
    "place": PLACES,
    "time": TIMES,
}


@dataclass(frozen=True)
class Meaning:
    """What a sentence says. Only an event has somebody who acts, a place and a time."""

    frame: str
    who: Concept | None
    action: Concept | None
    owner: str
    quality: Concept
    thing: Concept
    place: Concept | None
    time: Concept | None


class _Thing:
    """The thing of a Turkish sentence; a pattern asks for its case, as in {what:dative}."""

    def __init__(self, quality: str, stem: str, owner: str) -> None:
        self.quality, self.stem, self.owner = quality, stem, owner

    def __format__(self, case: str) -> str:
        return f"{self.quality} {noun_form(self.stem, self.owner, case)}"


def random_meaning(rng: random.Random) -> Meaning:
    """A meaning with each slot drawn uniformly."""
    meaning = Meaning(**{name: rng.choice(options) for name, options in SLOTS.items()})  # type: ignore[arg-type]
    return meaning if meaning.frame == "event" else replace(meaning, who=None, action=None, place=None, time=None)


def near_miss(meaning: Meaning, rng: random.Random) -> Meaning:
    """A meaning that differs from the given one in a single slot."""
    slot = rng.choice([f.name for f in fields(meaning) if f.name != "frame" and getattr(meaning, f.name) is not None])
    others = [option for option in SLOTS[slot] if option != getattr(meaning, slot)]
    return replace(meaning, **{slot: rng.choice(others)})  # type: ignore[arg-type]


def paraphrase(meaning: Meaning, language: str, rng: random.Random) -> str:
    """One of the sentences that express the meaning in a language ("en" or "tr")."""

    def word(concept: Concept | None) -> str:
        return rng.choice(getattr(concept, language)) if concept else ""

    did, _, done = word(meaning.action).partition("/")
    what: str | _Thing
    if language == "tr":
        what = _Thing(word(meaning.quality), word(meaning.thing), meaning.owner)
    else:
        what = f"{meaning.owner or 'the'} {word(meaning.quality)} {word(meaning.thing)}"
    pattern = rng.choice(PATTERNS[meaning.frame, language])
    where, when = word(meaning.place), word(meaning.time)
    sentence = pattern.format(who=word(meaning.who), did=did, done=done, what=what, where=where, when=when)
    return capitalize(sentence) if language == "tr" else sentence[0].upper() + sentence[1:]
