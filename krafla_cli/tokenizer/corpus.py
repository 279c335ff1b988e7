"""The text on which two tokenizers are compared: scripts, code, blanks, digits, marks, joiners, emoji, added tokens.

Everything is made from what is written here, so it is the same on every machine and needs no file.
"""

from __future__ import annotations

import functools
import random
import unicodedata
from collections.abc import Iterator, Sequence

from krafla_cli.formats.mlt import ATTR_ADDED, SPACE_MARK, Mlt

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "It's what they've said: we'll go, I'd stay, she's late, you're here, I'm not, don't!",
    "IT'S WHAT THEY'VE SAID: WE'LL GO, I'D STAY, YOU'RE HERE, I'M NOT, DON'T!",
    "Þetta er íslenskur texti um Kröflu við Mývatn.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Voilà l'été où l'œuvre naïve du garçon s'achève; «déjà» dit-il.",
    "El niño comió piñas ¿y tú? ¡También!",
    "Yarın sabah İstanbul'a gidiyoruz, ışıl ışıl bir gün.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Zażółć gęślą jaźń. Tiếng Việt có dấu thanh điệu.",
    "Съешь ещё этих мягких французских булок. Ґанок і їжак.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Πᾶσα ἡ ἀρχή.",
    "שלום עולם, מה שלומך היום? שָׁלוֹם",
    "السلام عليكم، كيف حالك؟ ١٢٣٤٥٦ مُحَمَّد",
    "فارسی می‌نویسم؛ نیم‌فاصله دارد. ۰۱۲۳۴",
    "नमस्ते दुनिया, क्षत्रिय ज्ञान १२३ हिन्दी।",
    "আমি বাংলায় গান গাই। ০১২৩",
    "வணக்கம் உலகம் தமிழ் ௧௨௩",
    "తెలుగు భాష చాలా అందంగా ఉంటుంది",
    "ಕನ್ನಡ ನಾಡು, മലയാളം ഭാഷ, ગુજરાતી, ਪੰਜਾਬੀ, සිංහල",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓",
    "ພາສາລາວ ភាសាខ្មែរ មួយពីរ မြန်မာစာ ၁၂၃",
    "བོད་སྐད་ ཡིག་ འབྲུ་ ༡༢༣",
    "今日は世界、カタカナとひらがな。東京タワーは333メートル。",
    "ｶﾞｷﾞｸﾞ ＡＢＣ １２３ ﾊﾟﾋﾟ",
    "你好，世界！人工智能的未来会怎样？繁體中文測試。",
    "안녕하세요 세계! 한국어 토큰화 시험 123개.",
    "ქართული ენა, Հայերեն լեզու, አማርኛ ፊደል, Ελλάς",
    "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ, ᐃᓄᒃᑎᑐᑦ, ꆈꌠꉙ, ꓡꓲꓢꓴ",
    "Ünïcödé ﬁ ﬂ ﬀ ½ ¼ ² ³ Ⅷ ⅻ ① ㉑ ℃ Å K ſ ß ẞ",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, ∑ᵢ₌₁ⁿ i² ≈ n³⁄3, α→β ⊕ γ",
    "👩‍👩‍👧‍👦 👍🏽 🇮🇸🇹🇷 ❤️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿 1️⃣ 🤷🏿‍♀️ 😀😀😀",
    "https://example.com/a-b_c?d=e&f=%20#g user@example.org C:\\temp\\x.txt",
    "brutalist architecture, antidisestablishmentarianism, pneumonoultramicroscopic",
    "3.14159 1,000,000 0x1F 1e-10 2024-05-06T07:08:09Z 12345678901234567890 v1.2.3",
    "! ! ! ... --- ??? !!! *** ___ === ### $$$ %%% ^^^ &&& ((())) [[[]]] {{{}}} <<<>>>",
    "def f(x: int) -> str:\n    if x > 0:\n\t\treturn f'{x!r}'\n    return \"\\n\"\n\n\n",
    '#include <stdio.h>\r\nint main(void) {\r\n\tputs("hi\\t");\r\n\treturn 0;\r\n}\r\n',
    '{"a": [1, 2.5, null, true], "b": {"c": "\\u00e9\\\\"}}\n',
    "SELECT * FROM t WHERE a<>'b' AND c>=10; -- end\n/* x */ <div class=\"a\">&nbsp;</div>",
    "| a | b |\n|---|:--|\n| 1 | 2 |\n\n- [ ] item\n  - sub\n\n```py\nx = 1\n```\n",
)

# Pieces that meet each other in mixed lines: where one ends and the next begins is where tokenizers differ.
FRAGMENTS = (
    *("a", "Z", "the", "Hello", "ing", "'s", "'S", "'ll", "'LL", "’s", "'ſ", "'", '"', "-", "_", ".", ",", "!", "?"),
    *("1", "12", "123", "1234", "1234567", "٣", "१२", "½", "Ⅷ", "²", "𝟙𝟚", "꘠", "೧"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\xa0", "\u1680", "\u2003"),
    *("\u2028", "\u2029", "\u202f", "\u3000", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u180e"),
    *("\u0301", "\u0323", "\u0308", "e\u0301", "o\u0323\u0302", "\u0344", "\u0958", "\u0f43", "\u1100\u1161\u11a8"),
    *("é", "ñ", "Å", "\u212b", "ﬁ", "\u2126", "ꣳ", "\ua3e4", "\ufb1d", "\u0340", "\U0001d15e", "\u2adc"),
    *("中", "文字", "ひ", "ガ", "カ\u3099", "한", "ก", "ำ", "क", "्", "ि", "ع", "ُ", "א", "ְ", "я", "Ω", "İ", "ı"),
    *("😀", "👍🏽", "❤", "\ufe0f", "🇮", "🇸", "\U000e0067", "\U0001f468\u200d", "𐍈", "𠀀", "\U0010fffd", "\ue000"),
    *("<", ">", "|", "<|", "|>", "[", "]", "</", "{", "}", "\\", "/", "#", "@", "$", "=", "+", "▁", "Ġ", "Ċ", "<0x41>"),
    *("\x00", "\x01", "\x1b", "\x7f", "\x80", "\ufffd", "\uffff", "\ufdd0"),
)


def blanks() -> Iterator[str]:
    """Runs of blanks of several lengths, alone and around words."""
    for blank in (" ", "\t", "\n", "\r\n", "\xa0", "\u3000", " \n", "\n "):
        for n in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 33):
            run = blank * n
            yield from (run, f"a{run}b", f"{run}1", f".{run}")


# Where Unicode has characters; of private and unassigned ranges, which are all alike, one block each.
_RANGES = ((0, 0xD800), (0xE000, 0x34000), (0x40000, 0x40080), (0xE0000, 0xE0200), (0xF0000, 0xF0080))
_BLOCK = 128


@functools.cache
def blocks() -> tuple[tuple[str, ...], ...]:
    """The characters of each block of 128 code points: those with a name, or all where none has one."""
    starts = [s for low, high in _RANGES for s in range(low, high, _BLOCK)]
    chars = [[chr(c) for c in range(start, start + _BLOCK)] for start in starts]
    return tuple(tuple(c for c in block if unicodedata.category(c) != "Cn") or tuple(block) for block in chars)


def code_points(per_block: int, rng: random.Random) -> Iterator[str]:
    """Up to ``per_block`` characters of each block in a few surroundings."""
    for block in blocks():
        for char in rng.sample(block, min(per_block, len(block))):
            yield from (char, f"a{char}b {char}{char}1")


def mixtures(n_lines: int, rng: random.Random, extra: Sequence[str] = ()) -> Iterator[str]:
    """``n_lines`` lines of fragments and ``extra`` strings glued together."""
    pool = (*FRAGMENTS, *extra)
    for _ in range(n_lines):
        yield "".join(rng.choice(pool) for _ in range(rng.randrange(2, 14)))


def around(contents: Sequence[str]) -> Iterator[str]:
    """Each added token glued to text, to blanks, to itself and to its neighbour, whole and cut."""
    for content, following in zip(contents, [*contents[1:], *contents[:1]], strict=True):
        yield from (content, f"x{content}y", f" {content} ", f"{content}{content}\n", f"{content} hello{following}")
        yield from (f"e{content}\u0301", f"{content[:-1]} {content[1:]}", f"\n{content}\n{following}1")


def pieces(mlt: Mlt, n_pieces: int) -> Iterator[str]:
    """About ``n_pieces`` of the vocabulary's own pieces as text, evenly spread over the ids, alone and after a word."""
    texts = [t.data for t in mlt.tokens if t.data and t.attr == 0]
    for data in texts[:: max(1, len(texts) // n_pieces)]:
        try:
            text = data.decode("utf-8").replace(SPACE_MARK, " ")
        except UnicodeDecodeError:
            continue
        yield from (text, f"word{text} {text}")


def lines(mlt: Mlt, n_lines: int = 2500, seed: int = 0) -> list[str]:
    """The corpus for ``mlt``: at least ``n_lines`` lines. The more, the more characters, pieces and mixtures."""
    rng = random.Random(seed)
    added = [t.data.decode("utf-8") for t in mlt.tokens if t.attr == ATTR_ADDED]
    some_added = added[:: max(1, len(added) * 8 // n_lines)]
    out = ["", *SENTENCES, *(f" {s}" for s in SENTENCES), *FRAGMENTS, *blanks(), *around(some_added)]
    out += code_points(max(1, n_lines // 5000), rng)
    out += pieces(mlt, n_lines // 10)
    n_mixed = max(n_lines - len(out), n_lines // 4)
    out += mixtures(n_mixed, rng, some_added[:20])
    return out
