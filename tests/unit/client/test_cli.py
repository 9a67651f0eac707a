"""The command line against a scripted gateway: output, JSON and exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from client.cli import app, keep_basis_points
from specprefill.v1 import gateway_pb2
from tests.unit.client.fake_gateway import fake_gateway

RUNNER = CliRunner()
WAIT_S = 20


def test_generate_streams_the_text_and_shows_the_stages() -> None:
    with fake_gateway() as (address, _):
        result = RUNNER.invoke(app, ["generate", "--ask", "hi", "--address", address])
    assert result.exit_code == 0, result.output
    assert result.stdout == "Héllo wörld\n"
    assert "score: draft prefill" in result.stderr
    assert "path SPARSE, reason ELIGIBLE" in result.stderr
    assert "kept 160 of 320 tokens" in result.stderr


def test_the_file_comes_first_and_the_question_last(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("The ferry leaves at nine.\n", encoding="utf-8")
    with fake_gateway() as (address, servicer):
        command = ["generate", "-f", str(text), "-a", "When?", "--system", "Be brief."]
        RUNNER.invoke(app, [*command, "--address", address])
    (request,) = servicer.requests
    assert isinstance(request, gateway_pb2.GenerateRequest)
    system, user = request.prompt.conversation.messages
    assert (system.role, system.content) == ("system", "Be brief.")
    assert user.content == "The ferry leaves at nine.\n\nWhen?"


@pytest.mark.parametrize(
    "command",
    [["generate", "-a", "hi"], ["explain", "-a", "hi"], ["health"], ["info"]],
)
def test_json_is_one_object_and_nothing_else(command: list[str]) -> None:
    with fake_gateway() as (address, _):
        result = RUNNER.invoke(app, [*command, "--json", "--address", address])
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == ""


def test_explain_shows_the_most_and_the_least_important_chunks() -> None:
    with fake_gateway() as (address, _):
        result = RUNNER.invoke(app, ["explain", "-a", "hi", "--chunks", "2", "--address", address])
    assert "text of chunk 9" in result.stdout
    assert "text of chunk 0" in result.stdout
    assert "text of chunk 5" not in result.stdout


def test_a_gateway_that_is_not_ready_is_exit_code_1() -> None:
    with fake_gateway(is_ready=False) as (address, _):
        result = RUNNER.invoke(app, ["health", "--address", address])
    assert result.exit_code == 1
    assert "ready NOT_SERVING" in result.stdout


def test_a_gateway_that_is_down_is_named_and_exit_code_3() -> None:
    result = RUNNER.invoke(app, ["generate", "-a", "hi", "--address", "127.0.0.1:1"])
    assert result.exit_code == 3
    assert "no gateway answers at 127.0.0.1:1" in result.stderr
    as_json = RUNNER.invoke(app, ["info", "--json", "--address", "127.0.0.1:1"])
    assert as_json.exit_code == 3
    assert json.loads(as_json.stdout)["error"]["reason"] == "UPSTREAM_UNAVAILABLE"


def test_a_gateway_whose_target_is_down_says_so_itself() -> None:
    with fake_gateway() as (address, servicer):
        servicer.is_target_down = True
        result = RUNNER.invoke(app, ["generate", "-a", "hi", "--address", address])
    assert result.exit_code == 3
    assert f"the gateway at {address} cannot answer now: the target is gone" in result.stderr


def test_ctrl_c_cancels_the_turn_and_is_exit_code_130() -> None:
    with fake_gateway() as (address, servicer):
        servicer.is_endless = True
        command = [sys.executable, "-m", "client.cli", "generate", "-a", "hi", "--address", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read(5) == b"again"
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
        assert servicer.cancelled.wait(WAIT_S)


def test_a_refusal_is_exit_code_1_with_the_reason() -> None:
    with fake_gateway() as (address, _):
        command = ["generate", "-a", "hi", "--keep", "20000", "--address", address]
        result = RUNNER.invoke(app, command)
    assert result.exit_code == 1
    assert "refused: keep rate above 10000" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "-a", "x", "--mode", "fast"],
        ["generate", "-a", "x", "--keep", "much"],
        ["generate", "-a", "x", "--query-mode", "tail"],
        ["generate", "-f", "no-such-file"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert RUNNER.invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20%", 2000),
        ("0.2", 2000),
        ("2000", 2000),
        ("12.5%", 1250),
        ("1.0", 10000),
        ("100%", 10000),
    ],
)
def test_a_keep_rate_is_written_in_three_ways(text: str, expected: int) -> None:
    assert keep_basis_points(text) == expected


@pytest.mark.parametrize("text", ["", "%", "nan%", "inf%", "2,5"])
def test_a_keep_rate_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        keep_basis_points(text)
