"""From files to results: groups over seeds, what is kept apart, and what is refused in one line."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lbq.errors import LbqError
from lbq.report.cells import images_cells, integer_cell, title_at
from lbq.report.layer_figures import layer_figures
from lbq.report.page import all_figures, render
from lbq.report.story import stories
from lbq.report.tables import all_tables, layer_table, runs_table
from lbq.results.gather import gather
from lbq.results.result import Gathered, Group, Result, names
from lbq.runs.records import read
from tests.support.report_runs import of_cifar, record, runs_folder


def analysis() -> Any:
    """That of `lbq-0` as trained, as JSON."""
    return json.loads((runs_folder() / "lbq-0" / "analysis" / "analysis.json").read_text())


def deployed(**facts: Any) -> dict[str, Any]:
    """The same as of the deployed network on its test set, with other facts."""
    made = analysis()
    known = {**made["facts"], "kind": "artefact", "data": made["facts"]["dataset"]}
    return {**made, "facts": {**known, **facts}}


def stored(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(value))
    return path


def run(folder: Path, place: int, seed: int = 0, changes: Any = None, **facts: Any) -> Path:
    """A record in a file of its own, with its own weights. changes: to the configuration."""
    made = record(seed=seed, weights_sha256=f"{place:064d}", **facts)
    made["config"] = {**made["config"], "seed": seed, **(changes or {})}
    return stored(folder, f"{place}.json", made)


def seeds(folder: Path, accuracies: list[float]) -> list[Path]:
    return [run(folder, seed, seed, test_accuracy=accuracy) for seed, accuracy in enumerate(accuracies)]


def test_seeds_form_a_group(tmp_path: Path) -> None:
    accuracies = [95.0, 96.0, 95.2]
    (group,) = gather(seeds(tmp_path, accuracies)).groups
    assert group.accuracies == accuracies
    assert group.mean == pytest.approx(sum(accuracies) / 3)
    assert group.title == "LBQ"


def test_a_seed_that_is_repeated_is_no_other_sample(tmp_path: Path) -> None:
    for i, (seed, accuracy) in enumerate([(0, 95.0), (1, 96.0), (0, 90.0)]):
        run(tmp_path, i, seed, test_accuracy=accuracy)
    groups = gather([tmp_path]).groups
    assert [(g.title, len(g.results), g.mean) for g in groups] == [("LBQ", 2, 95.5), ("LBQ, run 2", 1, 90.0)]


def test_an_unfinished_run_is_no_repeat(tmp_path: Path) -> None:
    half = record(weights_sha256="", unfinished=True, log=[])
    whole = record(weights_sha256="a" * 64)
    found = gather([stored(tmp_path, f"{i}.json", made) for i, made in enumerate((half, whole))])
    assert [(r.title, r.repeat) for r in found.results] == [("LBQ", 1), ("LBQ", 1)]


def test_a_run_whose_neuron_is_not_known_here_is_named(tmp_path: Path) -> None:
    shutil.copytree(runs_folder() / "lbq-0", tmp_path / "own")
    config = tmp_path / "own" / "config.toml"
    config.write_text(config.read_text().replace('name = "lbq"', 'name = "mine"'))
    (tmp_path / "own" / "result.json").unlink()  # which names the configuration
    with pytest.raises(LbqError, match=r"^.*/own: unknown neuron 'mine'; known: .* .one of your own: lbq --import"):
        gather([tmp_path], read)


def test_a_name_is_the_records_or_the_variants_title() -> None:
    def title(**changes: Any) -> str:
        return Result(record(**changes), "x").title

    assert title(name="LBQ, SAM") == "LBQ, SAM"
    assert title() == title(name="") == "LBQ"
    assert title(variant="v3", surrogate="box_et") == "V3 (learned + box)"  # the surrogate has a column
    assert title(variant="mine") == "mine"
    assert title(config={"optim": {"sam": 0.05}, "train": {"ema": 0.999}}) == "LBQ"  # nothing is inferred


def test_configurations_of_one_name_are_told_apart_by_their_settings(tmp_path: Path) -> None:
    for i, (seed, cutout) in enumerate([(0, 0), (0, 3), (1, 3)]):
        run(tmp_path, i, seed, {"augment": {"cutout": cutout}})
    one, other = gather([tmp_path]).groups
    assert (len(one.results), len(other.results)) == (1, 2)
    assert (one.title, other.title) == ("LBQ, augment.cutout=0", "LBQ, augment.cutout=3")
    assert [r.title for r in gather([tmp_path / "1.json", tmp_path / "2.json"]).results] == ["LBQ", "LBQ"]
    stored(tmp_path, "0.json", {**json.loads((tmp_path / "0.json").read_text()), "name": "LBQ, no cutout"})
    assert [g.title for g in gather([tmp_path]).groups] == ["LBQ, no cutout", "LBQ"]


@pytest.mark.parametrize(
    "other", [{"optim": {"lr": 9.0, "momentum": 0.5}, "augment": {"cutout": 3}}, {"name": "x" * 99}]
)
def test_many_settings_or_long_ones_become_a_hash(tmp_path: Path, other: dict[str, Any]) -> None:
    other = {"neuron": other} if "name" in other else other
    one, two = gather([run(tmp_path, 0, 0, {}), run(tmp_path, 1, 0, other)]).results
    assert one.title == f"LBQ #{one.key[:6]}" != two.title == f"LBQ #{two.key[:6]}"


def test_runs_of_the_same_weights_with_other_results_are_rows_of_their_own(tmp_path: Path) -> None:
    """As where they were tested on other images, or one was not tested."""
    made = record(weights_sha256="a" * 64, test_accuracy=90.0)
    for changes in ({"test_accuracy": 10.0}, {"test_accuracy": None}, {"data_sha256": "b" * 64}):
        paths = [stored(tmp_path, f"{i}.json", one) for i, one in enumerate((made, {**made, **changes}))]
        assert len(gather(paths).results) == 2
    with pytest.raises(LbqError, match="same run: give it once"):
        gather([stored(tmp_path, f"{i}.json", made) for i in range(2)])


@pytest.mark.parametrize("shown", ["dataset", "model", "timesteps", "n_max", "epochs"])
def test_no_hash_is_needed_where_a_column_tells_runs_apart(tmp_path: Path, shown: str) -> None:
    first = record(weights_sha256="a" * 64)
    changed = "mlp" if isinstance(first[shown], str) else first[shown] + 1
    second = {**first, "weights_sha256": "b" * 64, shown: changed, "config": {"optim": {"lr": 0.7}}}
    results = gather([stored(tmp_path, f"{i}.json", made) for i, made in enumerate((first, second))]).results
    assert [r.title for r in results] == ["LBQ", "LBQ"]
    assert len(set(names(results))) == 2


def own_run(folder: Path, place: int, root: str, data: str, **facts: Any) -> None:
    """A run folder on a user's own data, as `own_record` reads it."""
    (folder / f"{place}").mkdir()
    (folder / f"{place}" / "config.toml").write_text(f'[data]\nname = "arrays"\nroot = "{root}"\n')
    own = {"dataset": "arrays", "data_sha256": data * 32, "weights_sha256": f"{place:064d}", **facts}
    stored(folder / f"{place}", "own.json", own)


def own_record(folder: Path) -> dict[str, Any]:
    made = record(**json.loads((folder / "own.json").read_text()))
    made["config"] = {**made["config"], "data": {"name": "arrays", "root": ""}}
    return made


def test_a_users_own_data_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    own_run(tmp_path, 0, "here/leaves", "ab", seed=0)
    own_run(tmp_path, 1, "here/leaves", "ab", seed=1)
    alone = gather([tmp_path], own_record)
    assert [(r.dataset, r.title) for r in alone.results] == [("arrays", "LBQ")] * 2
    own_run(tmp_path, 2, "here/mice", "cd")
    own_run(tmp_path, 3, "here/mice", "", unfinished=True, test_accuracy=None)  # whose data its folder tells
    gathered = gather([tmp_path], own_record)
    leaves, mice = "arrays (leaves)", "arrays (mice)"
    assert [(r.dataset, r.title) for r in gathered.results] == [(d, "LBQ") for d in (leaves, leaves, mice, mice)]
    assert [len(group.results) for group in gathered.groups] == [2, 1]
    assert names([group.first for group in gathered.groups]) == [f"LBQ, {leaves}", f"LBQ, {mice}"]
    told = [story for story in stories(gathered) if not story.chosen]
    assert {story.dataset for story in told} == {leaves, mice}
    page = render(gathered)
    assert "highest of" not in page
    assert all(f"of the test images of {dataset} right" in page for dataset in (leaves, mice))
    ids = [figure.id for figure in all_figures(gathered)]
    assert len(set(ids)) == len(ids)
    assert [row.cells[1].text for row in runs_table(gathered).rows] == [leaves, mice]


@pytest.mark.parametrize("roots", [("a/images", "b/images"), ("a/leaves", ""), ("a/leaves", ".")])
def test_data_in_folders_of_one_name_or_of_none_are_told_apart_by_their_hashes(
    tmp_path: Path, roots: tuple[str, str]
) -> None:
    for place, (root, data) in enumerate(zip(roots, ("ab", "cd"), strict=True)):
        own_run(tmp_path, place, root, data)
    assert [r.dataset for r in gather([tmp_path], own_record).results] == [
        "arrays (data ababab)",
        "arrays (data cdcdcd)",
    ]


def test_data_of_records_are_told_apart_where_they_are_the_users_own(tmp_path: Path) -> None:
    for name, dataset, expected in (
        ("arrays", "Leaves", ["Leaves (data ababab)", "Leaves (data cdcdcd)", "Leaves (data not known)"]),
        ("cifar10", "cifar10", ["cifar10"] * 3),
    ):
        for place, data in enumerate(("ab", "cd", "")):
            run(tmp_path, place, 0, {"data": {"name": name}}, dataset=dataset, data_sha256=data * 32)
        assert [r.dataset for r in gather([tmp_path]).results] == expected


def test_a_repeat_says_which_configuration_it_repeats(tmp_path: Path) -> None:
    for i, batch in enumerate((64, 256, 64)):
        run(tmp_path, i, changes={"train": {"batch_size": batch}}, batch_size=batch)
    first, other, again = gather([tmp_path]).results
    assert again.title == f"{first.title}, run 2" != f"{other.title}, run 2"


def test_what_changes_no_result_makes_no_other_group(tmp_path: Path) -> None:
    paths = seeds(tmp_path, [95.0, 96.0, 96.5, 97.0])
    settings = (("checkpoint_minutes", 9.0), ("cuda_graph", False), ("tensorboard", True), ("epochs", 99))
    for path, (key, value) in zip(paths, settings, strict=True):
        made = json.loads(path.read_text())
        made["config"]["train"][key] = value
        made["name"] = f"LBQ, {key}"
        path.write_text(json.dumps(made))
    assert [(g.title, len(g.results)) for g in gather(paths).groups] == [
        ("LBQ, checkpoint_minutes", 3),
        ("LBQ, epochs", 1),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"data_sha256": "b" * 64},
        {"data_sha256": ""},  # as of older records
        {"split": "another"},
        {"init_sha256": "b" * 64},  # of the weights that it began with
        {"versions": {"kernel": "reference"}},  # which rounds otherwise
    ],
    ids=str,
)
def test_seeds_of_one_configuration_may_still_be_of_different_things(tmp_path: Path, change: dict[str, Any]) -> None:
    for seed, facts in enumerate(({}, change, {})):
        run(tmp_path, seed, seed, **facts)
    one, other = gather([tmp_path]).groups
    assert (len(one.results), len(other.results)) == (2, 1)
    assert one.title != other.title


def test_what_stands_for_a_row_of_the_paper_is_decided_by_facts() -> None:
    assert of_cifar(n_max=5).plain
    assert of_cifar(variant="lif", n_max=1, surrogate="arctan").plain
    assert of_cifar(variant="v3", surrogate="box").plain
    assert of_cifar(variant="v3", surrogate="box_et").plain  # which the paper leaves open
    for change in (
        {"n_max": 1},
        {"timesteps": 4},
        {"dataset": "cifar100"},
        {"model": "resnet8w16"},
        {"surrogate": "arctan"},
        {"variant": "v3"},  # with LBQ's surrogate
    ):
        assert not of_cifar(**change, name="V3 (learned + box)" if "variant" in change else "LBQ").plain, change
    assert not of_cifar(name="LBQ, SAM").plain  # it says that it is something else
    assert "N_max = 1" in title_at(Group([of_cifar(n_max=1)]))


def test_folders_of_runs_and_records(tmp_path: Path) -> None:
    seeds(tmp_path, [95.0, 96.0])
    assert len(gather([tmp_path]).results) == 2
    found = gather([runs_folder()], read)
    assert [Path(r.source).name for r in found.results] == ["ann", "half", "lbq-0", "lbq-1"]
    assert [Path(r.source).name for r in found.unfinished] == ["half"]
    assert sorted(len(g.results) for g in found.groups) == [
        1,
        2,
    ]  # two seeds of LBQ, one ANN; what is not finished is in none
    (artefact,) = found.artefacts
    assert artefact.name == "model.lbq"


def test_an_analysis_finds_its_run(tmp_path: Path) -> None:
    made = analysis()
    paths = [stored(tmp_path, "r.json", record()), stored(tmp_path, "a.json", made)]
    (result,) = gather(paths).results
    assert result.analysis is not None
    assert result.analysis.images == made["images"] == 599
    # alone it stands for itself
    (alone,) = gather([*paths[1:], stored(tmp_path, "again.json", made)]).results
    assert len(alone.analyses) == 2  # of the same weights: one network
    assert alone.accuracy == made["accuracy"]
    assert alone.title == "LBQ"
    assert alone.steps == result.steps


def test_a_run_has_analyses_as_trained_and_as_deployed(tmp_path: Path) -> None:
    trained = analysis()
    facts = {**trained["facts"], "kind": "artefact"}
    integer = {**trained, "accuracy": 91.0, "facts": facts, "traces": []}
    part = {**integer, "accuracy": 12.0, "complete": False, "images": 700}
    paths = [stored(tmp_path, f"{i}.json", value) for i, value in enumerate((record(), trained, part, integer))]
    (result,) = gather(paths).results
    assert len(result.analyses) == 3
    assert result.analysis is not None
    assert result.analysis.accuracy == 91.0  # the whole test set, on integers
    assert result.integer_accuracy == 91.0
    assert len(result.traces) == len(trained["traces"]) > 0
    (without,) = gather(paths[:3]).results
    assert without.analysis is not None
    # of the whole set, rather than on integers of a part
    assert without.analysis.accuracy == trained["accuracy"] != 12.0
    assert without.integer_accuracy is None
    (alone,) = gather(paths[3:]).results
    assert alone.accuracy is None
    assert alone.integer_accuracy == 91.0


def test_images_of_a_users_own_are_no_test_set(tmp_path: Path) -> None:
    own = {**deployed(data="mine.npz"), "accuracy": 100.0, "images": 99_999}
    values = (record(), own, {**deployed(), "accuracy": 91.0})
    paths = [stored(tmp_path, f"{i}.json", value) for i, value in enumerate(values)]
    (result,) = gather(paths[:2]).results
    assert (result.integer_accuracy, images_cells(Group([result]))[0].text) == (None, "99,999 of mine.npz")
    assert any("99,999 images of mine.npz" in figure.caption for figure in layer_figures(Gathered([result])))
    (result,) = gather(paths).results
    assert (result.integer_accuracy, images_cells(Group([result]))[0].text) == (91.0, "599")


def test_networks_of_a_users_own_are_called_after_their_files(tmp_path: Path) -> None:
    """Which name neither dataset nor model, and say nothing of their training."""
    unknown = {"dataset": "", "model": "", "variant": "deployed", "weights_sha256": "", "config_hash": "", "epochs": 0}
    folders = [tmp_path / name for name in ("small", "large")]
    for folder in folders:
        folder.mkdir()
        stored(folder, "analysis.json", deployed(**unknown, name=f"{folder.name}.lbq", data="mine.npz"))
    found = gather(folders)
    rows = [[cell.text for cell in row.cells] for row in runs_table(found).rows]
    assert [[*row[:3], row[5], row[-1]] for row in rows] == [
        ["Deployed network", "mine.npz", f"{name}.lbq", "", f"{name}/analysis.json"] for name in ("small", "large")
    ]
    assert all(result.alone and result.recipe == "epochs not known" for result in found.results)


def test_a_deployed_network_that_names_its_model_is_called_after_its_file(tmp_path: Path) -> None:
    (result,) = gather([stored(tmp_path, "analysis.json", deployed(name="mine.lbq"))]).results
    assert (result.title, result.record["model"]) == ("mine.lbq", "resnet8w2")


def test_a_network_that_was_deployed_over_other_timesteps_is_another(tmp_path: Path) -> None:
    values = (record(), *({**deployed(timesteps=t), "accuracy": 90.0 + t} for t in (1, 2)))
    run, other = gather([stored(tmp_path, f"{i}.json", value) for i, value in enumerate(values)]).results
    assert (run.alone, run.record["timesteps"], run.integer_accuracy) == (False, 2, 92.0)
    assert (other.alone, other.record["timesteps"], other.integer_accuracy) == (True, 1, 91.0)
    assert other.title == "LBQ, over T = 1 (trained over 2)"
    assert all(other.record[key] == run.record[key] for key in ("variant", "n_max", "epochs", "seed"))


def test_networks_of_unlike_bits_have_no_mean(tmp_path: Path) -> None:
    texts = []
    for bits in ((8, 8), (4, 4), (8, 4)):
        for seed, b in enumerate(bits):
            weights = f"{seed:064d}"
            stored(tmp_path, f"r{seed}.json", record(seed=seed, weights_sha256=weights))
            made = {**deployed(bits=b, weights_sha256=weights), "accuracy": 90.0 + 2 * seed}
            stored(tmp_path, f"a{seed}.json", made)
        (group,) = gather([tmp_path]).groups
        texts.append(integer_cell(group).text)
    assert texts == ["91.00 ± 1.41", "91.00 ± 1.41 (4 bits)", ""]


def test_golden_inputs_are_no_test_set(tmp_path: Path) -> None:
    golden = {**deployed(data="golden inputs"), "images": 8}
    message = r"g.json is of 8 golden inputs.*make it again with lbq analyze model.lbq --data"
    with pytest.raises(LbqError, match=message):
        gather([stored(tmp_path, "r.json", record()), stored(tmp_path, "g.json", golden)])


def test_what_lies_beside_a_run_is_found_once(tmp_path: Path) -> None:
    shutil.copytree(runs_folder() / "lbq-0", tmp_path / "run")
    shutil.copytree(runs_folder() / "ann", tmp_path / "run" / "baselines" / "ann")
    (tmp_path / "run" / "baselines" / "notes").mkdir()
    folder = tmp_path / "run" / "model.analysis"
    folder.mkdir()
    stored(folder, "analysis.json", deployed())
    for given in ([tmp_path / "run"], [tmp_path], [tmp_path / "run" / "baselines" / "ann", tmp_path / "run"]):
        found = gather(given, read)
        assert sorted(r.title for r in found.results) == ["ANN", "LBQ"]
        (run,) = [r for r in found.results if r.title == "LBQ"]
        assert [a.deployed for a in run.analyses] == [False, True]
    stored(folder, "analysis.json", deployed(weights_sha256="f" * 64))
    message = r"model.analysis.analysis\.json is of other weights than .*run holds: deploy the run"
    with pytest.raises(LbqError, match=message):
        gather([tmp_path], read)


def test_an_integer_record_finds_its_run(tmp_path: Path) -> None:
    integer: dict[str, Any] = {"of": "r.json", "test_accuracy": 93.5, "arithmetic": "integer: 8-bit"}
    paths = [stored(tmp_path, "i.json", integer), stored(tmp_path, "r.json", record())]
    found = gather(paths)
    assert found.results[0].integer == integer
    (row,) = runs_table(found).rows
    assert [c.text for c in row.cells if c.hint.startswith("integer")] == ["93.50"]
    with pytest.raises(LbqError, match="give that record too"):
        gather(paths[:1])
    for accuracy in (101, math.nan, "high"):
        stored(tmp_path, "i.json", {**integer, "test_accuracy": accuracy})
        with pytest.raises(LbqError, match=r"i.json is damaged: test_accuracy must be a number from 0 to 100"):
            gather(paths)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "is not a record of lbq"),
        ([], "must hold a JSON object"),
        ({"format": "lbq record", "version": 2}, "not a record of version 1"),
        ({"format": "lbq analysis", "version": 9}, "is not an analysis of version 1"),
        ({"format": "lbq analysis", "version": 1}, "is damaged"),
        ({"format": "something"}, "'something'"),
    ],
)
def test_bad_files(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(LbqError, match=message):
        gather([stored(tmp_path, "x.json", value)])


def test_bad_paths(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 10**5)
    twins = [stored(tmp_path, f"{name}.json", record()) for name in "ab"]
    for paths, message in (
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path / "empty"], "holds no runs, no records and no deployed"),
        ([], "nothing to report"),
        ([tmp_path / "x.txt"], "neither a record"),
        ([tmp_path / "x.json"], "cannot be read as JSON"),
        ([tmp_path / "deep.json"], r"deep\.json cannot be read as JSON"),
        ([runs_folder() / "lbq-0"], "make a record of it"),
        (twins, "same run: give it once"),
    ):
        with pytest.raises(LbqError, match=message):
            gather(paths)
    assert gather([stored(tmp_path, "speed.json", {"sweeps": []})]).benchmarks == [{"sweeps": []}]  # enough to report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_max": "five"}, "n_max must be a whole number, not negative, not 'five'"),
        ({"epochs": None}, "epochs must be a whole number, not negative, not None"),
        ({"timesteps": 0}, "timesteps must be a whole number above 0, not 0"),
        ({"seed": True}, "seed must be a whole number, not negative, not True"),
        ({"log": [1, 2]}, r"log\[0\] must be an object, not 1"),
        ({"log": [{"epoch": 1, "loss": "x"}]}, r"log\[0\].loss must be a number, not 'x'"),
        ({"log": [{"loss": 1.0}]}, r"log\[0\].epoch is missing"),
        ({"log": [{"epoch": 1, "loss": 10**400}]}, r"log\[0\].loss must be a number, not 1000"),
        ({"config": {"neuron": 5}}, "config.neuron must be an object, not 5"),
        ({"config": []}, r"config must be an object, not \[\]"),
        ({"name": ["LBQ"]}, r"name must be a text.*, not \['LBQ'\]"),
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"batch_size": [64]}, r"batch_size must be a whole number above 0, not \[64\]"),
        ({"steps": {"sn1": "x" * 99}}, "steps.sn1 must be a number, not 'xxx.*\\.\\.\\."),
        ({"test_accuracy": math.nan}, "test_accuracy must be a number from 0 to 100, not nan"),
        ({"holdout_accuracy": 101}, "holdout_accuracy must be a number from 0 to 100, not 101"),
        ({"versions": "1.0"}, "versions must be an object"),
        ({"step_gradient": 1}, "step_gradient must be a text"),
        ({"unfinished": "no"}, "unfinished must be true or false"),
        ({"version": 99}, "version 99: not a record of version 1; make it again with lbq record RUN"),
    ],
    ids=str,
)
def test_damaged_records_are_named_with_the_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = stored(tmp_path, "a.json", record(**change))
    with pytest.raises(LbqError, match=f"a.json .*{message}"):
        gather([path])


def test_a_damaged_run_folder_is_named_with_the_field() -> None:
    with pytest.raises(LbqError, match="lbq-1 is damaged: active.sn1 must be a number, not 'half'"):
        gather([runs_folder() / "lbq-1"], lambda folder: record(active={"sn1": "half"}))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("layers.0.membrane", {"counts": [[1]], "thresholds": []}, r"layers\[0\].membrane.thresholds must be a list"),
        ("layers.0.membrane", {"counts": [[1]], "thresholds": [1.0]}, r"layers\[0\].membrane.counts must have 72 bins"),
        ("layers.0.membrane", {"counts": [[1]]}, r"layers\[0\].membrane.thresholds is missing"),
        ("layers.0.membrane.thresholds.0", 1e308, r"layers\[0\].membrane.thresholds\[0\] must be a number from 0 to 2\^53"),
        ("layers.0.levels", [[1, 2]], r"layers\[0\].levels must count the levels 0 to 5 of at least one neuron"),
        ("layers.0.levels", [[0, 0, 0, 0, 0, 0]], r"layers\[0\].levels must count the levels 0 to 5"),
        ("layers.0.levels", [[2**70, 0, 0, 0, 0, 0]], r"layers\[0\].levels\[0\]\[0\] must be a whole number"),
        ("layers.1.step", "x", r"layers\[1\].step must be a number"),
        ("images", 0, "images must be a whole number above 0"),
        ("accuracy", 900, "accuracy must be a number from 0 to 100"),
        ("facts.timesteps", "two", "facts.timesteps must be a whole number"),
        ("accounts.exact.fp_macs", 0, "accounts.exact.fp_macs must be a number above 0"),
        ("accounts.exact.synapses", {"x": {}}, "accounts.exact.synapses.x.unary is missing"),
        ("accounts.exact.horner", "x", "accounts.exact.horner must be a number, not negative"),
        ("accounts.exact.level_bits", 2.5, "accounts.exact.level_bits must be a whole number from 0 to 22"),
        ("accounts.rate", None, "accounts.rate must be an object"),
        ("accounts.rate", ..., "accounts must hold exact and rate, or neither"),
        ("traces.0.levels", [1], r"traces\[0\] must give current, before, levels and after at the same timesteps"),
    ],
    ids=str,
)  # fmt: skip
def test_damaged_analyses_are_named_with_the_field(tmp_path: Path, place: str, value: Any, message: str) -> None:
    whole = analysis()
    *path, last = (int(key) if key.isdigit() else key for key in place.split("."))
    inner = whole
    for key in path:
        inner = inner[key]
    inner[last] = value
    if value is ...:
        del inner[last]
    with pytest.raises(LbqError, match=f"a.json is damaged: {message}.*; make it again with lbq analyze"):
        gather([stored(tmp_path, "a.json", whole)])
    with pytest.raises(LbqError, match=f"r.json: analysis is damaged: {message}"):
        gather([stored(tmp_path, "r.json", record(analysis=whole))])


def test_what_a_newer_file_says_besides_is_passed_over(tmp_path: Path) -> None:
    whole = analysis()
    for place in (whole, whole["layers"][0], whole["traces"][0], whole["accounts"]["exact"]["synapses"]["fc"]):
        place["later"] = 1
    found = gather([stored(tmp_path, "a.json", whole)])
    assert all_tables(found)


def test_an_integer_record_belongs_to_the_record_beside_it(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rec.json").write_text(json.dumps(record(seed=seed, weights_sha256=name * 64)))
    integer = {"of": "rec.json", "test_accuracy": 12.34}
    (tmp_path / "b" / "rec_int8.json").write_text(json.dumps(integer))
    found = gather([tmp_path / "a", tmp_path / "b"])
    assert [r.integer_accuracy for r in found.results] == [None, 12.34]
    (tmp_path / "c.json").write_text(json.dumps(integer))
    with pytest.raises(LbqError, match="and there are 2 of that name: put it beside its record"):
        gather([tmp_path / "a", tmp_path / "b" / "rec.json", tmp_path / "c.json"])


def test_only_like_analyses_are_averaged() -> None:
    def analysed(seed: int, images: int, complete: bool) -> Result:
        made = gather([runs_folder() / "lbq-0"], read).results[0]
        first = replace(made.analyses[0], images=images, complete=complete)
        return replace(made, record={**made.record, "seed": seed, "weights_sha256": str(seed) * 64}, analyses=[first])

    group = Group([analysed(0, 5, False), analysed(1, 599, True), analysed(2, 599, True)])
    assert [r.record["seed"] for r, _ in group.analysed] == [1, 2]
    (row,) = [r for r in layer_table([group]).rows if r.kind == "ours"]
    assert any("599 × 2 seeds" in c.text for c in row.cells)


def test_timesteps_of_an_ann_are_told_where_it_is_shown_as_many_frames() -> None:
    ann = {"variant": "ann", "step": "none", "surrogate": "none", "n_max": 0}

    def run(steps: int, **changes: Any) -> Result:
        made = record(timesteps=steps)
        made.pop("static")  # which older records do not say
        return Result({**made, **changes}, str(steps))

    def shown(*steps: int, **changes: Any) -> list[str]:
        return names([run(t, **ann, **changes) for t in steps])

    assert shown(1, 2) == ["ANN", "ANN"]  # an image once, whatever it says
    assert shown(2, 6, dataset="nmnist") == ["ANN, T=2", "ANN, T=6"]
    assert shown(2, 2, dataset="nmnist") == ["ANN", "ANN"]
    assert shown(2, 6, dataset="arrays") == ["ANN", "ANN"]  # may be either
    assert shown(2, 6, dataset="arrays", static=False) == ["ANN, T=2", "ANN, T=6"]
    assert shown(2, 6, dataset="arrays", static=True) == ["ANN", "ANN"]
    assert names([run(2, static=False), run(6, static=False, **ann)]) == ["LBQ", "ANN"]  # told apart already
