"""Features on the command line: the tables of the settings file, the columns of a catalogue, `arms add --feature`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.folder import FolderTap, taking_orders
from worker.cli.main import load
from worker.cli.options.catalog import read_arms
from worker.cli.options.learning import context_dim
from worker.cli.options.parser import build_parser, filled
from worker.cli.options.places import resolve
from worker.embedded.runner import Embedded
from worker.errors import InputError
from worker.simulation.traffic.generator import TrafficSettings
from worker.stream.features import Features
from worker.stream.settings import Arm, LearningSettings

TABLES = """\
[features.context]
age = "number"
device = ["mobile", "desktop"]
[features.ads]
price = "number"
brand = ["n"]
"""
ADS = Features.of_table({"ads": {"price": "number", "brand": ["n", "7"]}}).ads


def resolved(tmp_path: Path, text: str, *flags: str) -> argparse.Namespace:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    parsed = build_parser(load("worker"), "adcascade worker").parse_args(["--config", str(path), *flags])
    return resolve(parsed, environ={})


def test_the_tables_of_the_settings_file_declare_features_in_their_order(tmp_path: Path) -> None:
    options = resolved(tmp_path, f"horizon = 4\n{TABLES}")
    assert context_dim(options) == 3
    settings = filled(LearningSettings, options, dim=3)
    assert settings.features == Features.of_table(
        {"context": {"age": "number", "device": ["mobile", "desktop"]}, "ads": {"price": "number", "brand": ["n"]}}
    )
    assert (settings.horizon, settings.standardise) == (4, True)
    assert not filled(LearningSettings, resolved(tmp_path, TABLES, "--no-standardise"), dim=3).standardise
    options = resolved(tmp_path, f"[features]\ncrosses = [['device', 'age']]\n{TABLES}")
    crossed = filled(LearningSettings, options, dim=3)
    assert crossed.features is not None
    assert crossed.features.crosses == (("device", "age"),)
    assert (crossed.dim, crossed.model_dim) == (3, 5)


def test_another_dimension_than_the_declared_one_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--dim is 5, but the declared features of contexts have 3 columns"):
        context_dim(resolved(tmp_path, TABLES, "--dim", "5"))
    assert context_dim(resolved(tmp_path, TABLES, "--dim", "3")) == 3
    assert context_dim(resolved(tmp_path, "", "--dim", "5")) == 5


def test_serving_does_not_start_with_more_columns_than_a_window_can_fold(
    tmp_path: Path, monkeypatch, adcascade
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.toml").write_text("[features.context]\ncountry = { hashed = 2000 }\n")
    (tmp_path / "ads.csv").write_text("arm,reward\na,1\n")
    ended = adcascade("serve --config wide.toml --catalog ads.csv --state state")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith("adcascade: 2,000 columns of contexts and 1 ad take about 17.2 s per fold")


# ── catalogues ───────────────────────────────────────────────────────────────────────────────────────────────────────

WANTED = (
    Arm(arm="a", reward=1.0, features={"price": 10.5, "brand": "n"}),
    Arm(arm="b", reward=2.0, features={"price": 3.0, "brand": "7"}),
)
FILES = {
    "arms.csv": "arm,reward,price,brand\na,1,10.5,n\nb,2,3,7\n",
    "arms.json": '[{"arm":"a","reward":1,"price":10.5,"brand":"n"},{"arm":"b","reward":2,"price":3,"brand":"7"}]',
    "nested.json": '{"arms":[{"arm":"a","reward":1,"features":{"price":10.5,"brand":"n"}},'
    '{"arm":"b","reward":2,"features":{"price":3,"brand":"7"}}]}',
    "arms.toml": '[[arms]]\narm = "a"\nreward = 1\nprice = 10.5\nbrand = "n"\n'
    '[[arms]]\narm = "b"\nreward = 2\nprice = 3\nbrand = "7"\n',
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("declared", [None, ADS], ids=["inferred", "declared"])
def test_further_columns_of_a_catalogue_are_features(tmp_path: Path, name: str, declared: Any) -> None:
    (tmp_path / name).write_text(FILES[name])
    assert read_arms(str(tmp_path / name), declared=declared) == WANTED


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.json", '[{"arm": "a", "reward": 1}, {"arm": "b", "reward": 0.5, "active": false}]'),
        ("x.json", '{"arms": [{"arm": "a", "reward": 1}]}'),
        ("x.json", '{"a": 1}'),
        ("x.csv", "arm,reward,active\na,1,true\nb,0.5,no\n"),
        ("x.csv", "reward,arm\n1,a\n"),
        ("x.toml", '[[arms]]\narm="a"\nreward=1\n[[arms]]\narm="b"\nreward=0.5\nactive=false\n'),
        ("x.toml", "[arms]\na = 1\n"),
    ],
)
def test_arms_are_read_from_json_csv_and_toml(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    arms = (Arm(arm="a", reward=1.0), Arm(arm="b", reward=0.5, active=False))
    assert read_arms(str(tmp_path / name)) == arms[: 1 + ("0.5" in text)]


@pytest.mark.parametrize(
    ("name", "content", "declared", "message"),
    [
        ("x.json", "{", None, "cannot be read"),
        ("x.json", "5", None, "must have a list of arms"),
        ("x.json", "[]", None, "has no arms"),
        ("x.toml", "arms = 3", None, "must have a list of arms"),
        ("x.json", '[{"arm": "a"}]', None, "entry 1 has no reward"),
        ("x.json", '["a"]', None, "must have arm and reward"),
        ("x.json", '{"a": -1}', None, "reward must be a number above zero"),
        (
            "x.json",
            '{"a": 1e16}',
            None,
            r"arm 'a': the reward must be a number above zero, from 1e-12 to 1e\+12, not 1e",
        ),
        ("x.json", '{"a": true}', None, "reward must be a number above zero"),
        ("x.json", '{"a\\u0007": 1}', None, "printable"),
        (
            "x.json",
            '[{"arm":"a","reward":1},{"arm":"b","price":1}]',
            None,
            "2 has no reward: add what a click on the ad earns, such as your CPC",
        ),
        ("x.csv", "a,1\n", None, "has no arms"),
        ("x.csv", "a,1\nb,2\n", None, "row 2 has no arm"),
        ("x.csv", "id,reward\na,1\n", None, "row 2 has no arm; if 'id' is meant, rename it to arm"),
        ("x.csv", "arm,reward,activ\na,1,no\n", None, "if 'activ' is meant, rename it to active"),
        ("x.csv", "arm,reward\na,much\n", None, "row 2, reward: 'much' is not a number"),
        ("x.csv", "arm,reward\na,1\nb,\n", None, "row 3, reward: the cell is empty"),
        ("x.csv", "arm;reward\na;1,5\n", None, "row 2, reward: '1,5' is not a number; write a decimal point"),
        (
            "x.csv",
            "arm,reward\na,1,5\n",
            None,
            r"row 2: another number of cells than the header \(3\); a decimal comma\?",
        ),
        ("x.csv", "arm,reward\na,1\na,2\n", None, "'a' is listed twice"),
        ("x.csv", "arm,reward,price\na,1,3\n", ADS, "row 2 has no brand, a declared feature of ads"),
        ("x.csv", "arm,reward,price,brand,size\na,1,3,n,L\n", ADS, "row 2, size: this feature is not declared"),
        ("x.csv", "arm,reward,price,brand\na,1,3,n\nb,1,dear,n\n", ADS, "row 3, price: 'dear' is not a number"),
        ("x.csv", "arm;reward;price;brand\na;1;3,5;n\n", ADS, "row 2, price: .*write a decimal point, not a comma"),
        ("x.csv", "arm,reward,price,brand\na,1,,n\n", None, "row 2, price: the cell is empty"),
        ("x.csv", "arm,reward,price,price\na,1,3,4\n", None, "row 1: the column 'price' is there twice"),
        ("x.csv", "arm,reward,price,brand\na,1,nan,n\n", ADS, "row 2, price: must be a finite number"),
        ("x.csv", "arm,reward,x\na,1,3\nb,1,-inf\n", None, "row 3, x: must be a finite number, not -inf"),
        ("x.json", '[{"arm":"a","reward":1,"x":1},{"arm":"b","reward":1}]', None, "entry 2 has no x, which"),
        ("x.json", '[{"arm":"a","reward":1,"price":"3","brand":"n"}]', ADS, "entry 1, price: a number is declared"),
        (
            "x.json",
            '[{"arm":"a","reward":1,"x":null}]',
            None,
            "entry 1, x: a feature must be a number, a text,",
        ),
        ("x.toml", '[[arms]]\narm = "a"\nreward = 1\nx = nan\n', None, "entry 1, x: must be a finite number"),
        (
            "x.csv",
            "arm,reward,price,brand\na,1,3,nn\n",
            ADS,
            "row 2, brand: .nn. is not a listed .*; did you mean n\\?",
        ),
        (
            "x.csv",
            "arm,reward,price,brand\na,1,3,x\n",
            ADS,
            "not a listed value; values are n, 7. .*features apply",
        ),
    ],
)
def test_a_wrong_catalogue_is_refused_in_one_line_with_row_and_column(
    tmp_path: Path, name: str, content: str, declared: Any, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_arms(str(tmp_path / name), declared=declared)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("encoding", "code"), [("latin1", "latin1"), ("utf-16", "utf-16")])
def test_a_catalogue_in_another_encoding_is_refused_with_the_conversion(
    tmp_path: Path, encoding: str, code: str
) -> None:
    path = tmp_path / "ads.csv"
    path.write_text("arm,reward\ncafé,1\n", encoding=encoding)
    with pytest.raises(
        InputError, match=rf"row [12]: not UTF-8; convert the file: iconv -f {code} -t utf-8 {path} > utf8.csv"
    ):
        read_arms(str(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "arm,reward,organic\na,1,true\nb,1,False\n"),
        ("x.json", '[{"arm":"a","reward":1,"organic":true},{"arm":"b","reward":1,"organic":false}]'),
    ],
)
def test_booleans_of_ads_are_numbers(tmp_path: Path, name: str, text: str) -> None:
    declared = Features.of_table({"ads": {"organic": "boolean"}}).ads
    (tmp_path / name).write_text(text)
    arms = read_arms(str(tmp_path / name), declared=declared)
    assert [dict(arm.features) for arm in arms] == [{"organic": 1.0}, {"organic": 0.0}]


def test_a_table_that_a_command_does_not_use_is_noted(tmp_path: Path, monkeypatch, adcascade) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.toml").write_text(TABLES)
    noted = "--config all.toml: `adcascade traffic` does not use [features]\n"
    assert adcascade("traffic --write-arms arms.json --config all.toml").err == noted
    assert "does not use" not in adcascade("serve --beta x --config all.toml").err
    # It has an option --features, which is no table.
    simulated = adcascade("simulate --episodes 2 --seeds 1 --policy random --jobs 1 --config all.toml")
    assert (simulated.code, simulated.err) == (0, noted.replace("traffic", "simulate"))
    monkeypatch.setenv("ADCASCADE_CONFIG", "all.toml")  # for all commands
    assert adcascade("traffic --write-arms arms.json").err == ""


def test_a_catalogue_needs_no_further_column_for_the_revenue_as_a_feature(tmp_path: Path) -> None:
    declared = Features.of_table({"ads": {"reward": "number", "price": "number"}}).ads
    (tmp_path / "x.csv").write_text("arm,reward,price\na,1,3\n")
    assert read_arms(str(tmp_path / "x.csv"), declared=declared)[0].features == (("price", 3.0),)
    (tmp_path / "y.csv").write_text("arm,price\na,3\n")
    with pytest.raises(InputError, match="has no reward"):
        read_arms(str(tmp_path / "y.csv"), declared=declared)


def test_a_worker_can_read_the_arms_that_the_traffic_writes(tmp_path: Path, adcascade: Any) -> None:
    path = tmp_path / "arms.json"
    assert adcascade(f"traffic --environment rare --arms 11 --seed 4 --write-arms {path}").code == 0
    assert list(read_arms(str(path))) == TrafficSettings(environment="rare", arms=11, seed=4).world().catalogue()
    printed = adcascade("traffic --arms 3 --write-arms -").json
    assert [arm["arm"] for arm in printed] == ["ad-1", "ad-2", "ad-3"]


def test_a_column_of_numbers_and_texts_is_a_category(tmp_path: Path) -> None:
    for name, text in (
        ("x.csv", "arm,reward,size\na,1,40\nb,1,L\n"),
        ("x.json", '[{"arm":"a","reward":1,"size":40},{"arm":"b","reward":1,"size":"L"}]'),
    ):
        (tmp_path / name).write_text(text)
        assert [arm.features for arm in read_arms(str(tmp_path / name))] == [(("size", "40"),), (("size", "L"),)]


# ── arms ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A state folder that takes orders, of a runner whose ads have features."""
    path = tmp_path / "state"
    with FolderTap(path) as tap:
        Embedded(LearningSettings(dim=2), WANTED, tap=tap)
    with taking_orders(path):
        yield path


def test_an_ad_is_added_with_its_features_and_keeps_them(folder: Path, tmp_path: Path, adcascade: Any) -> None:
    def arms(line: str) -> Any:
        ended = adcascade(f"arms {line} --state {folder}")
        assert ended.code == 0
        return ended

    arms("add c --reward 3 --feature price=7 --feature brand=n")
    arms("price c --reward 4")
    arms("retire a")
    listed = arms("list --json -").json["arms"]
    added = {"arm": "c", "reward": 4.0, "active": True, "features": {"price": 7.0, "brand": "n"}}
    assert listed[2].items() >= added.items()
    assert listed[2]["total"]["displays"] == 0
    assert listed[0]["features"] == {"price": 10.5, "brand": "n"}
    assert "price" in arms("list").out
    (tmp_path / "arms.csv").write_text("arm,reward,price,brand\nb,2,3.5,7\nc,4,7,n\n")
    assert "0 added, 0 retired, 1 changed" in arms(f"sync {tmp_path}/arms.csv --yes").out
    assert "nothing to do" in arms(f"sync {tmp_path}/arms.csv --yes").out


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("--feature price=7", "arm 'c' has no brand, a declared feature of ads: give --feature brand=VALUE"),
        ("--feature price=dear --feature brand=n", "price: 'dear' is not a number"),
        ("--feature price=7 --feature brand=n --feature size=3", "size: this feature is not declared"),
        ("--feature price=7 --feature price=8 --feature brand=n", "--feature price: the feature is given twice"),
        ("--feature price", "must be NAME=VALUE"),
        ("", "arm 'c' has no"),
    ],
)
def test_an_ad_whose_features_do_not_fit_is_one_line(folder: Path, adcascade, features: str, message: str) -> None:
    ended = adcascade(f"arms add c --reward 3 {features} --state {folder}")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert message in ended.err
