"""Wrong input of every command: one line, exit 2, and nothing is written."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest

from tests.embedded.traffic import ARMS, settings
from tests.golden.recording import GOLDEN
from tests.serve.folder import FolderTap
from worker.cli.main import main
from worker.embedded.runner import Embedded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text (file), a recorded log (log), a state folder (state), and catalogs of arms."""
    folder = tmp_path_factory.mktemp("surroundings")
    (folder / "file").write_text("mine")
    (folder / "empty.json").write_text("[]")
    (folder / "good.csv").write_text("arm,reward\na,1\n")
    shutil.copy(GOLDEN, folder / "log")
    with FolderTap(folder / "state") as tap:
        Embedded(settings(), ARMS, tap=tap)
    return folder


WRONG = {
    "demo --users 0": "--users: must be at least 1",
    "demo --metrics-port 70000": "--metrics-port: must be at most 65535",
    "demo --bonus paper": "bonus paper needs --repeats",
    "demo --json here.json --record here.json": "here.json: two outputs cannot be the same file",
    "demo --json missing/numbers.json": "missing/numbers.json: the folder",
    "demo --report missing/deep": "missing/deep: the folder",
    "demo --report .": ".: is a folder, not a file",
    "demo --episode 3": "unrecognized arguments: --episode 3; did you mean --episodes?",
    "demo --beta nan": "--beta: must be finite",
    "demo --beta inf": "--beta: must be finite",
    "demo --beta -1": "--beta: must be at least 0",
    "demo --users 1.5": "--users: must be a whole number, not '1.5'",
    "demo --policy gredy": "--policy: unknown value 'gredy'; did you mean greedy? one of ",
    "demo --unheard-of": "(see adcascade demo --help)",
    "demo --horizom=1": "did you mean --horizon?",
    "worker --dim 2 --beta much": "--beta: must be a number, not 'much'",
    "worker --dim 2 --window 0": "window must be a whole number of at least 1",
    "worker --dim 2 --window 60": "--window: must be a time with a unit",
    "worker --dim 2 --window 1.0001s": "of whole milliseconds, not '1.0001s'",
    "worker --dim 2 --window=-5s": "--window: must be a time with a unit",
    "worker --dim 2 --window '5 weeks'": "--window: must be a time with a unit",
    "worker --dim 2 --member-timeout 1ms": "--member-timeout: must be at least 1s, not 1ms",
    "worker --dim 2 --progress-interval 2m": "--progress-interval: must be at most 60s, not 2m",
    "worker --dim 2 --bonus paper": "needs --repeats",
    "worker --dim 2 --order a,b": "--order is for --policy fixed",
    "worker --dim 2 --policy fixed --catalog good.csv --order a,b": "--order: there is no ad 'b'; the catalogue has a",
    "worker --dim 2 --max-norm 0.5": "--max-norm: must be at least 1",
    "worker --dim 2 --prefix 'a b'": "prefix",
    "worker --dim 2 --token-secret-file /none": "--token-secret-file /none",
    "simulate --episodes 1": "at least 2",
    "simulate --episodes 6 --warmup 6": "leaves none of 6",
    "simulate --model personal --no-intercept": "the model personal has an intercept",
    "simulate --features 3": "the environment opposite has no features; use tastes or leaving",
    "simulate --new-arms 3": "new-arms and join go together",
    "simulate --new-arms 3 --join 301": "join must be one of the episodes 2 to 300",
    "simulate --environment newcomers": "the environment newcomers needs new arms: give --new-arms and --join",
    "simulate --environment tastes --levels 3": "the environment tastes has no levels; use categories",
    "simulate --spread 1.5": "--spread",
    "simulate --environment digits --dim 5": "digits has 64 context features and 10 arms, not 5 and 10",
    "simulate --policy greedy --policy greedy": "given twice",
    "simulate --plot regret.gif": ".png, .svg, .pdf",
    "simulate --plot a.png --json a.png": "a.png: two outputs cannot be the same file",
    "traffic --look 5s-1s": "look",
    "traffic --look long": "--look",
    "traffic --disorder -1s": "--disorder",
    "evaluate log --confidence 1": "must be below 1",
    "evaluate log --policy greedy --epsilon 0.1": "--epsilon is for --policy epsilon-greedy only",
    "evaluate log --policy greedy --order ad-1": "--order is for --policy fixed",
    "evaluate log --policy fixed --order ad-77": "--order: there is no ad 'ad-77'; did you mean 'ad-",
    "evaluate log --parameters /nowhere": "No such file",
    "evaluate log --prefix other": "try --prefix ads",
    "explain --context [0]": "--parameters FILE, --state DIR or --broker is needed",
    "explain --parameters file": "--context is missing",
    "explain --parameters - --context -": "both",
    "explain --parameters nowhere.json --context [0]": "No such file",
    "explain --parameters . --context [0]": "directory",
    "explain --version 0 --state state --context [0,0,0] --exclude zebra": "no such arm",
    "explain --version 0 --state state --context [0,0,0] --why-not zebra": "no such arm",
    "explain log --session user-00150 --why-not ad-11": "no such arm; did you mean ad-",
    "replay log --relearn --output log": "log is named twice: an output needs another file",
    "explain log --session nobody --html ./log": "log is named twice: an output needs another file",
    "explain log --session nobody": "log: session nobody is not there",
    "explain log --session x --broker b": "log and --broker are several sources",
    "explain log --session x --exclude ad": "--exclude is for --context",
    "explain log --context [0]": "LOG is for --session ID without --context",
    "explain --session x": "the source is missing: a log, --state DIR or --broker",
    "explain --state state --session x": "state (where the sessions of open windows are",
    "explain --state nowhere --session x": "nowhere holds no state",
    "explain log --session x --prefix other": "try --prefix ads",
    "explain log --session x --html -": "--html needs the name of a file",
    "explain log --session x --html missing/page": "the folder",
    "replay log --relearn --output -": "--output needs the name of a file",
    "export log --output -": "--output needs the name of a file",
    "demo --report -": "--report needs the name of a file",
    "record new.gz --from yesterday": "--from",
    "record new.gz --until tomorrow": "--until",
    "record new.gz --topics arrivals,nonsense": "nonsense",
    "record new.gz --live --until 2030-01-01T00:00:00Z": "--live",
    "replay missing.jsonl": "missing.jsonl: No such file",
    "replay": "required: FILE",
    "replay log --verify --relearn": "give one of them",
    "replay log --prefix shop": "--prefix ads",
    "replay log --catalog arms.json": "--catalog is for --relearn",
    "replay log --relearn --catalog missing.json": "--catalog missing.json: No such file",
    "replay log --relearn --catalog empty.json": "no arms",
    "replay log --relearn --window 0": "window must be",
    "replay log --relearn --order ad-1": "--order is for --policy fixed",
    "parameters show": "--state DIR or --broker",
    "parameters show --state /nowhere/at/all": "holds no state",
    "parameters tag --state X": "required: NAME",
    "parameters export --state state --output /nowhere/file": "does not exist",
    "parameters show --version 999 --state state": "is not kept",
    "arms add ad-0 --reward 1 --state state": "active already",
    "arms add new --state state": "--reward is missing",
    "arms add new --reward nan --state state": "must be finite",
    "arms price none --reward 1 --state state": "there is no arm",
    "arms sync missing.csv --state state": "FILE missing.csv: No such file",
    "arms sync good.csv --state state": "--yes is missing",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_gives_one_line_and_exit_2_and_writes_nothing(capsys, folder, monkeypatch, line):
    monkeypatch.chdir(folder)
    before = sorted(os.walk("."))
    command, *arguments = shlex.split(line)
    result = [] if command in ("parameters", "arms", "worker") else ["--json", "result.json"]
    assert main([command, *result, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("adcascade: ")
    assert err.count("\n") == 1
    assert WRONG[line] in err
    assert sorted(os.walk(".")) == before
