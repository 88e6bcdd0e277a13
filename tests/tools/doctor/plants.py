"""What changes in prompts, in many ways of writing: by request, by day, by conversation, by release."""

from __future__ import annotations

import base64
import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from tests.tools.doctor import logs

START = datetime(2026, 11, 29, 10, 15, 2, 123456)
HEX, BASE32 = "0123456789abcdef", "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")
NAMES = ("Ann Miller", "Bob Stone", "Cyd Ray", "Dee Fox", "Eve Adams", "Finn Lund", "Gus Hall", "Hana Mori")
GERMAN = ("Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag")
CHINESE = "〇一二三四五六七八九"
ARABIC, DEVANAGARI = "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९"


@dataclass(frozen=True)
class Plant:
    """``value(number)`` stands in ``line``; ``kinds`` are the classes that are right. ``number`` counts its changes."""

    name: str
    kinds: frozenset[str]
    line: str
    value: Callable[[int], str]


def moment(number: int, step: int = 37) -> datetime:
    return START + timedelta(seconds=step * number)


def code(number: int, length: int, letters: str = BASE62) -> str:
    return "".join(random.Random(number * 7919).choices(letters, k=length))


def _digits(text: str, digits: str) -> str:
    return "".join(digits[int(c)] if c in "0123456789" else c for c in text)


def _chinese(number: int) -> str:
    tens = ("" if number < 20 else CHINESE[number // 10]) + ("十" if number >= 10 else "")
    return tens + (CHINESE[number % 10] if number % 10 or not tens else "")


def _uuid7(number: int) -> str:
    bits = random.Random(number).getrandbits(62)
    return str(uuid.UUID(int=int(moment(number).timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | bits))


def _roman(number: int) -> str:
    return "X" * (number // 10) + ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"][number % 10]


def _strftime(form: str, step: int = 37) -> Callable[[int], str]:
    return lambda n: moment(n, step).strftime(form)


def _plants(*kinds: str, **found: tuple[str, Callable[[int], str]]) -> list[Plant]:
    return [Plant(name, frozenset(kinds), line, value) for name, (line, value) in found.items()]


def _documents(number: int) -> str:
    return "\n\n".join(f"[{i}] {logs.sentence(random.Random(number * 9 + i), 40)}." for i in range(3))


def _time_of_day(form: str, step: int = 61) -> Callable[[int], str]:
    return lambda n: form.format(h=moment(n, step).hour, m=moment(n, step).minute)


EACH_REQUEST = [
    *_plants(
        "clock_time",
        microseconds=("Time: {}", lambda n: moment(n).isoformat()),
        zulu=("<now>{}</now>", _strftime("%Y-%m-%dT%H:%M:%SZ")),
        mail=("Date: {}", _strftime("%a, %d %b %Y %H:%M:%S +0000")),
        ctime=("{}", _strftime("%a %b %d %H:%M:%S %Y")),
        time_only=("The time is {}.", _strftime("%H:%M:%S")),
        half_day=("It is {} now.", _strftime("%I:%M %p", 61)),
        compact=("stamp {}", _strftime("%Y%m%d%H%M%S")),
        compact_parts=("run_{}", _strftime("%Y%m%d-%H%M%S")),
        web_server=("{}", _strftime("%d/%b/%Y:%H:%M:%S +0000")),
        seconds=("now={}", lambda n: str(int(moment(n).timestamp()))),
        milliseconds=("{}", lambda n: str(int(moment(n).timestamp() * 1000))),
        nanoseconds=("t: {}", lambda n: f"{int(moment(n).timestamp())}123456789"),
        fractions=("t: {}", lambda n: f"{moment(n).timestamp():.6f}"),
        german=("Heute ist {}.", lambda n: f"{GERMAN[6]}, der 29. November 2026, {moment(n):%H:%M:%S} Uhr"),
        german_dots=("Stand: {}", _strftime("%d.%m.%Y, %H.%M.%S Uhr")),
        french=("Nous sommes le {}.", _time_of_day("dimanche 29 novembre 2026, il est {h} h {m:02}")),
        spanish=("Hoy es {}", _strftime("domingo, 29 de noviembre de 2026, %H:%M:%S")),
        russian=("Сейчас {}.", _strftime("29 ноября 2026 г., %H:%M:%S")),
        chinese=("当前时间：{}", _strftime("%Y年%m月%d日 星期日 %H:%M:%S")),
        chinese_numerals=(
            "现在是{}。",
            lambda n: f"二〇二六年十一月二十九日{_chinese(moment(n, 61).hour)}时{_chinese(moment(n, 61).minute)}分",
        ),
        japanese=("現在の日時は{}です。", _strftime("%Y年%m月%d日 %H時%M分%S秒")),
        japanese_era=("本日: {}", _time_of_day("令和8年11月29日(日) 午前{h}時{m}分")),
        korean=("현재 시각: {}", _time_of_day("2026년 11월 29일 오전 {h}시 {m}분")),
        arabic=("الوقت الآن {}", lambda n: _digits(f"{moment(n):%Y-%m-%d %H:%M:%S}", ARABIC)),
        hindi=("समय {}", lambda n: _digits(f"{moment(n):%d-%m-%Y %H:%M:%S}", DEVANAGARI)),
        no_known_format=("stardate {}", _strftime("%j.%H.%M.%S")),
        bars=("{}", _strftime("%d|%m|%Y|%H|%M|%S")),
    ),
    *_plants(
        "request_id",
        uuid4=("Request {}", lambda n: str(uuid.UUID(int=random.Random(n).getrandbits(128), version=4))),
        uuid7=("id={}", _uuid7),
        ulid=("id: {}", lambda n: "01KB" + code(n, 22, BASE32)),
        ksuid=("({})", lambda n: code(n, 27)),
        short=("Ref {}", lambda n: code(n, 7)),
        prefixed=("req_{}", lambda n: code(n, 10)),
        traceparent=("traceparent: {}", lambda n: f"00-{code(n, 32, HEX)}-{code(n + 999, 16, HEX)}-01"),
        base64=("nonce {}", lambda n: base64.b64encode(random.Random(n).randbytes(12)).decode()),
        snowflake=("msg {}", lambda n: str(1180000000000000000 + n * 155189248000 + random.Random(n).getrandbits(12))),
        five_hex=("cch={};", lambda n: code(n, 5, HEX)),
    ),
    *_plants(
        "counter",
        counter=("Call {}", lambda n: str(n + 1)),
        counter_of=("Request {} of 500", lambda n: str(n + 1)),
        padded=("n={}", lambda n: f"{n:05d}"),
        in_words=("This is call number {}.", lambda n: WORDS[n % 13]),
        ordinal=("This is your {} call.", lambda n: f"{n + 1}{'st' if n == 0 else 'nd' if n == 1 else 'th'}"),
        downwards=("Tokens left: {}", lambda n: str(100000 - n * 713)),
        roman=("Round {}", lambda n: _roman(n + 1)),
        thousands=("Dies ist die {}. Anfrage.", lambda n: f"{994 + 3 * n:,}".replace(",", ".")),
        lakhs=("अनुरोध {}", lambda n: f"12,34,{560 + n}"),
    ),
    *_plants(
        "hash",
        sha256=("prompt hash {}", lambda n: code(n, 64, HEX)),
        sha1=("{}", lambda n: code(n, 40, HEX)),
        md5=("md5:{}", lambda n: code(n, 32, HEX)),
    ),
    *_plants(
        "path",
        temporary=("Workdir {}", lambda n: f"/tmp/tmp{code(n, 8, BASE32.lower())}/work"),
        windows=("cwd {}", lambda n: f"C:\\Users\\svc\\AppData\\Local\\Temp\\{code(n, 6)}"),
    ),
    *_plants(
        "other",
        measure=("load {}", lambda n: f"{random.Random(n).random():.3f}"),
        rate=("EUR/USD {}", lambda n: f"1.{random.Random(n).randint(1000, 1999)}"),
    ),
    *_plants("other", state=("Outside: {}", lambda n: ("light rain", "fog", "snow", "dry and cold", "hail")[n % 5])),
    *_plants("retrieved_text", documents=("<context>\n{}\n</context>", _documents)),
]
EACH_DAY = _plants(
    "date",
    iso=("Date: {}", lambda d: f"2026-09-{14 + d}"),
    american=("Today is {}.", lambda d: f"September {14 + d}, 2026"),
    german=("Heute: {}", lambda d: f"{14 + d}. September 2026"),
    french=("Nous sommes le {}", lambda d: f"{14 + d} septembre 2026"),
    chinese=("今天是{}", lambda d: f"2026年9月{14 + d}日"),
    chinese_weekday=("今天是星期{}。", lambda d: "一二三"[d]),
    thai=("วันนี้คือ {}", lambda d: ("30 เมษายน 2569", "1 พฤษภาคม 2569", "2 พฤษภาคม 2569")[d]),
    hindi=("आज {}", lambda d: ("31 जनवरी 2026", "1 फ़रवरी 2026", "2 फ़रवरी 2026")[d]),
    end_of_month=("Today: {}", lambda d: ("30 September 2026", "1 October 2026", "2 October 2026")[d]),
    weekday=("It is {} today.", lambda d: ("Monday", "Tuesday", "Wednesday")[d]),
)
EACH_CONVERSATION = [
    *_plants(
        "session_id", session=("Session: {}", lambda c: f"s-{1000 + c}"), number=("chat {}", lambda c: code(c, 6))
    ),
    *_plants(
        "user_data",
        mail=("User: {}", lambda c: NAMES[c % 8].lower().replace(" ", ".") + "@example.org"),
        phone=("Caller: {}", lambda c: f"+49 30 {random.Random(c % 4).randint(10**6, 10**7 - 1)}"),
        prose=("{} has been with us for many years and likes short answers.", lambda c: NAMES[c % 8]),
        profile=(
            "profile = {}",
            lambda c: json.dumps({"name": NAMES[c % 8], "age": 30 + c, "plan": ["pro", "free"][c % 2]}),
        ),
        japanese=("お客様のお名前：{}", lambda c: ("田中太郎", "佐藤花子", "鈴木一郎", "高橋美咲")[c % 4]),
    ),
    *_plants(
        "path",
        home=("Working directory: {}", lambda c: f"/home/{NAMES[c % 8].split()[0].lower()}/projects/shop"),
        volume=("Files: {}", lambda c: f"/var/lib/pods/{uuid.UUID(int=random.Random(c).getrandbits(128))}/mnt"),
        mac=("cwd={}", lambda c: f"/Users/{NAMES[c % 8].split()[0].lower()}/Library/Mobile Documents/app"),
    ),
]
EACH_RELEASE = _plants(
    "version",
    semantic=("Version {}", lambda r: f"4.{r}.0"),
    build=("build {}", lambda r: f"{8123 + r * 17}"),
    updated=("Last updated: {}", lambda r: f"2026-0{3 + r}-1{r} 14:0{r}:11"),
    updated_day=("Prompt last updated {}", lambda r: f"2026-0{3 + r}-1{r}"),
    german=("Zuletzt geändert am {}", lambda r: f"1{r}.0{3 + r}.2026 um 14:0{r} Uhr"),
    without_a_name=("({})", lambda r: f"2026-0{3 + r}-1{r}T14:0{r}:11Z"),
    tag=("prompt@{}", lambda r: f"2026.0{3 + r}.{r}-rc{r}"),
)
