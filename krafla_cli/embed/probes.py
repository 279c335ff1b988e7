"""The fixed texts that fingerprints are looked for with: the same for every model, release and machine."""

from __future__ import annotations

import numpy as np

MIN_PROBES = 768
_WORDS = """
ev su ekmek kedi köpek çocuk kadın adam okul kitap kalem masa araba yol deniz dağ ağaç çiçek güneş ay yıldız gece gündüz
sabah akşam yağmur kar rüzgar ateş taş toprak şehir köy sokak kapı pencere oda bahçe yemek çay kahve süt elma ekmekçi
öğretmen öğrenci doktor asker kral anne baba kardeş dost düşman iş para zaman saat gün hafta yıl dün bugün yarın büyük
küçük uzun kısa güzel çirkin iyi kötü eski yeni sıcak soğuk hızlı yavaş açık kapalı mavi kırmızı yeşil sarı siyah beyaz
gitmek gelmek görmek bilmek istemek yapmak almak vermek sormak söylemek yazmak okumak uyumak koşmak sevmek nerede nasıl
neden ne kim ve ile ama çünkü için gibi kadar çok az her bir iki üç dört beş on yüz bin
house water bread cat dog child woman man school book pen table car road sea mountain tree flower sun moon star night
morning evening rain snow wind fire stone earth city village street door window room garden food tea coffee milk apple
teacher student doctor soldier king mother father brother friend enemy work money time hour day week year yesterday
today tomorrow large small long short beautiful ugly good bad old new hot cold fast slow open closed blue red green
yellow black white go come see know want make take give ask say write read sleep run love where how why what who and
with but because for like until much little every one two three four five ten hundred thousand price order invoice
delivery contract license model index search query document language computer network memory question answer weather
history science music picture machine bridge train station ticket market bank hospital police court law tax vote
a b c d e f g h i j k l m n o p q r s t u v w x y z ç ğ ı ö ş ü 0 1 2 3 4 5 6 7 8 9 10 42 100 1000 2024
die der das und nicht haus wasser le la les et une maison eau el los casa agua il della acqua дом вода и не мир
бир 水 人 大 中 日 学 家 本 한국 사람 물 집 بيت ماء من في שלום בית σπίτι νερό घर पानी . , ! ? - : ( ) % & " ' / + =
""".split()


def probe_texts(n: int) -> list[str]:
    """``n`` texts of one to seven words, always the same: the first texts do not depend on ``n``.

    First every word alone; then words by numpy's Philox counter generator with key 0, whose raw stream is fixed.
    """
    alone = _WORDS[:n]
    raw = np.random.Philox(key=0).random_raw(8 * max(1, n - len(alone))).reshape(-1, 8)
    drawn = [" ".join(_WORDS[int(word) % len(_WORDS)] for word in row[1 : 2 + int(row[0]) % 7]) for row in raw]
    return [*alone, *drawn][:n]
