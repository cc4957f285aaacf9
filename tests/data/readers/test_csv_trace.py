from __future__ import annotations

import pytest

from data.jsonl import Rejected
from data.readers.csv_trace import AZURE, BURSTGPT, read
from tests.data.readers.logs import lines, rows

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_azure_times_are_dates_to_100_ns() -> None:
    trace = lines(AZURE_HEADER + "\r", "2023-11-16 18:15:46.6805900,374,44\r", "2023-11-16 18:15:50.9951690,396,109\r")
    first, second = rows(read(AZURE, trace))
    assert second["t_s"] - first["t_s"] == pytest.approx(4.314579, abs=1e-5)
    assert first["shape"] == {"prompt_tokens": 374}
    assert (first["body"]["max_tokens"], second["body"]["max_tokens"]) == (44, 109)
    assert first["custom_id"] != second["custom_id"]


def test_azure_of_2024_has_offsets_and_may_have_more_columns() -> None:
    trace = lines("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", "2024-05-12 00:00:10+00:00,2,100,10")
    [row] = rows(read(AZURE, trace))
    assert row["shape"] == {"prompt_tokens": 100}


def test_burstgpt_is_read_with_and_without_sessions() -> None:
    [plain] = rows(read(BURSTGPT, lines(BURST_1, "45,ChatGPT,1087,230,1317,Conversation log")))
    assert (plain["t_s"], plain["body"]["max_tokens"], plain["shape"]) == (45.0, 230, {"prompt_tokens": 1087})
    assert "session_id" not in plain
    [third] = rows(read(BURSTGPT, lines(BURST_3, "19440110.0,1722ac82-0a46,43,GPT-4,906,446,1352,Conversation log")))
    assert third["session_id"] == "1722ac82-0a46"


def test_a_failed_or_broken_row_says_why_and_the_rest_goes_on() -> None:
    trace = lines(
        BURST_1,
        "1,GPT-4,300,0,300,API log",
        "2,GPT-4,300",
        "nan,GPT-4,300,5,305,API log",
        "4,GPT-4,3e2,5,305,API log",
        "5,GPT-4,300,5,305,API log",
    )
    *rejected, good = read(BURSTGPT, trace)
    assert [(r.line, r.reason) for r in rejected if isinstance(r, Rejected)] == [
        (2, "request tokens 300 and response tokens 0 must be 1 or more"),
        (3, "3 fields, the header has 6"),
        (4, "timestamp, request tokens and response tokens must be a time and two whole numbers"),
        (5, "timestamp, request tokens and response tokens must be a time and two whole numbers"),
    ]
    [row] = rows([good])
    assert row["t_s"] == 5.0


def test_a_header_without_a_needed_column_rejects_the_file_in_one_line() -> None:
    assert list(read(AZURE, lines("TIMESTAMP,ContextTokens", "x,1"))) == [
        Rejected(1, "the header lacks generatedtokens")
    ]
