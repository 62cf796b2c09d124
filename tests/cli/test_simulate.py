import sys

import pytest

from worker.simulation import environments

QUICK = "simulate --episodes 6 --seeds 2 --jobs 1 --dim 2 --arms 4 --horizon 3"


def test_json_on_standard_output_is_alone_there(adcascade):
    ended = adcascade(f"{QUICK} --policy ucbbp --policy greedy --users 5 --users 9 --json -")
    result = ended.json
    assert (ended.code, ended.err) == (0, "")
    assert set(result) == {"runs", "settings"}
    assert [(run["policy"], run["users"], run["seed"]) for run in result["runs"]] == [
        (policy, users, seed) for policy in ("ucbbp", "greedy") for users in (5, 9) for seed in (0, 1)
    ]
    for run in result["runs"]:
        assert len(run["regret"]) == len(run["reward"]) == 6
        assert run["projection"] > 0
        assert run["seconds"] > 0
    assert result["settings"]["environment"] == "opposite"
    assert result["settings"]["policy"] == ["ucbbp", "greedy"]


def test_the_table_has_a_line_per_policy_and_number_of_users(adcascade):
    code, out, _ = adcascade(f"{QUICK} --policy random --users 5 --users 9 --environment rare")
    assert code == 0
    assert out.startswith("rare: d = 2, K = 4, H = 3, T = 6")
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [["random", "5"], ["random", "9"]]
    assert "2 of 2" in out or "0 of 2" in out or "1 of 2" in out


def test_a_fixed_order_can_be_given_and_matters(adcascade):
    fixed = f"{QUICK} --policy fixed --policy greedy --no-repeats"
    first, other = (adcascade(f"{fixed} --order {order} --json -").json for order in ("ad-1,ad-2", "ad-4,ad-3"))
    assert other["settings"]["order"] == ["ad-4", "ad-3"]
    regrets = [[run["regret"][1:] for run in one["runs"] if run["policy"] == "fixed"] for one in (first, other)]
    assert regrets[0] != regrets[1]
    assert regrets[0] == [run["regret"][1:] for run in adcascade(f"{fixed} --json -").json["runs"][:2]]
    assert "--no-repeats --order ad-4,ad-3\n" in adcascade(f"{fixed} --order ad-4,ad-3").out
    assert adcascade(f"{fixed} --order ad-9").err == (
        "adcascade: --order: there is no ad 'ad-9'; did you mean 'ad-4'?\n"
    )
    assert adcascade(f"{QUICK} --order ad-4").err.startswith("adcascade: --order is for --policy fixed")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_plot_has_the_format_of_its_suffix(adcascade, tmp_path, suffix):
    regret = tmp_path / f"regret.{suffix}"
    code, _, err = adcascade(f"{QUICK} --users 4 --users 8 --plot {regret}")
    assert code == 0
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert regret.read_bytes().startswith(magic)
    assert err == f"wrote {regret}\n"


def test_a_plot_for_one_number_of_users_comes_with_a_note(adcascade, tmp_path):
    plot = tmp_path / "regret.svg"
    _, _, err = adcascade(f"{QUICK} --plot {plot}")
    assert "give --users several times" in err
    text = plot.read_text()
    assert "Time-averaged regret" in text
    assert "Context-averaged" not in text
    assert all(label in text for label in ("UCBBP", "AUCBBP", "ε-greedy"))


def test_without_matplotlib_one_line_names_the_package_to_install(adcascade, tmp_path, monkeypatch):
    monkeypatch.setattr("worker.simulation.plots.importlib.util.find_spec", lambda name: None)
    code, out, err = adcascade(f"{QUICK} --plot {tmp_path}/regret.png")
    assert (code, out) == (1, "")
    assert err == "adcascade: plots need matplotlib: pip install 'adcascade[lab]'\n"


def test_options_may_come_from_the_environment_and_from_a_file(adcascade, tmp_path, monkeypatch):
    config = tmp_path / "lab.toml"
    config.write_text('[simulate]\npolicy = ["greedy", "random"]\nridge = 2.5\nusers = 7\n')
    monkeypatch.setenv("ADCASCADE_RIDGE", "3.5")
    settings = adcascade(f"{QUICK} --config {config} --json -").json["settings"]
    assert (settings["policy"], settings["users"], settings["ridge"]) == (["greedy", "random"], [7], 3.5)


def test_the_table_and_the_runs_say_which_share_of_the_oracle_was_lost(adcascade):
    line = f"{QUICK} --policy random --environment tastes --model personal"
    assert "lost  lost, last 6" in adcascade(line).out
    run = adcascade(f"{line} --json -").json["runs"][0]
    assert len(run["oracle"]) == 6
    assert all(0 < regret < best for regret, best in zip(run["regret"], run["oracle"], strict=True))


def test_the_table_has_the_share_lost_after_new_arms(adcascade):
    more = "--model personal --features 2 --new-arms 3 --join 3"
    code, out, _ = adcascade(f"{QUICK} --policy ucbbp --environment tastes {more}")
    assert code == 0
    assert more in out
    assert "lost, 3–6" in out


def test_without_scikit_learn_one_line_names_it(adcascade, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    environments.load_digits.cache_clear()
    code, out, err = adcascade("simulate --environment digits --dim 64 --horizon 3 --episodes 2 --jobs 1")
    assert (code, out) == (1, "")
    assert err.endswith("adcascade: the environment digits needs scikit-learn: pip install scikit-learn\n")


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ("categories", "--levels 7 --noise"),
        ("categories", "--levels 7 --dim 0"),
        ("silent", "--reported 0.3"),
        ("newcomers", "--join 3 --new-arms 2 --prices unequal"),
        ("newcomers", "--join 3 --new-arms 2 --better 4 --spread 1"),
        ("drift", "--change ads-and-tastes --forgetting auto"),
        ("interactions", "--interaction 2 --crosses none"),
        ("skewed", ""),
    ],
)
def test_the_worlds_of_the_third_release_run_and_are_named_with_their_options(adcascade, environment, options):
    line = f"{QUICK} --environment {environment} --model personal --policy aucbbp {options}"
    code, out, err = adcascade(line)
    assert (code, err) == (0, "")
    assert all(part in out for part in options.removesuffix("--dim 0").split())
    assert adcascade(f"{line} --json -").json["settings"]["environment"] == environment
