"""From files to results: groups over seeds, what is kept apart, and what is refused in one line."""

from __future__ import annotations

import inspect
import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lbq.config import LATER, Config
from lbq.errors import LbqError
from lbq.neuron import BurstNeuron
from lbq.report.cells import images_cells, integer_cell, title_at
from lbq.report.layer_figures import layer_figures
from lbq.report.tables import all_tables, layer_table, runs_table
from lbq.results.gather import gather
from lbq.results.result import UNNAMED, USUAL, Gathered, Group, Result, names
from lbq.runs.records import read
from tests.support.report_runs import of_cifar, record, runs_folder


def analysis() -> Any:
    """That of `lbq-0` as trained, as JSON."""
    return json.loads((runs_folder() / "lbq-0" / "analysis" / "analysis.json").read_text())


def stored(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(value))
    return path


def seeds(folder: Path, accuracies: list[float]) -> list[Path]:
    paths = []
    for seed, accuracy in enumerate(accuracies):
        made = record(test_accuracy=accuracy, weights_sha256=f"{seed:064d}", seed=seed)
        made["config"] = {**made["config"], "seed": seed}
        paths.append(stored(folder, f"s{seed}.json", made))
    return paths


def test_seeds_form_a_group(tmp_path: Path) -> None:
    accuracies = [95.0, 96.0, 95.2]
    (group,) = gather(seeds(tmp_path, accuracies)).groups
    assert group.n == 3
    assert group.mean == pytest.approx(sum(accuracies) / 3)
    assert group.sd == pytest.approx(statistics.stdev(accuracies))
    assert group.title == "LBQ"


def test_a_seed_that_is_repeated_is_no_other_sample(tmp_path: Path) -> None:
    for i, (seed, accuracy) in enumerate([(0, 95.0), (1, 96.0), (0, 90.0)]):
        made = record(test_accuracy=accuracy, weights_sha256=f"{i:064d}", seed=seed)
        made["config"] = {**made["config"], "seed": seed}
        stored(tmp_path, f"{i}.json", made)
    groups = gather([tmp_path]).groups
    assert [(g.title, g.n, g.mean) for g in groups] == [("LBQ", 2, 95.5), ("LBQ, run 2", 1, 90.0)]


def test_a_seed_is_repeated_though_an_older_record_does_not_name_its_data(tmp_path: Path) -> None:
    for i, data in enumerate(["", "a" * 8, "b" * 8]):
        stored(tmp_path, f"{i}.json", record(weights_sha256=f"{i:064d}", data_sha256=data))
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    assert [r.repeat for r in gather(paths[:2]).results] == [1, 2]
    assert [r.repeat for r in gather(paths[1:]).results] == [1, 1]
    assert [g.n for g in gather(paths).groups] == [1, 1, 1]


def test_an_unfinished_run_is_no_repeat(tmp_path: Path) -> None:
    half = record(weights_sha256="", unfinished=True, log=[])
    whole = record(weights_sha256="a" * 64)
    found = gather([stored(tmp_path, f"{i}.json", made) for i, made in enumerate((half, whole))])
    assert [(r.title, r.repeat) for r in found.results] == [("LBQ", 1), ("LBQ", 1)]


def test_analyses_of_the_same_weights_are_of_one_network(tmp_path: Path) -> None:
    (result,) = gather([stored(tmp_path, f"{i}.json", analysis()) for i in range(2)]).results
    assert len(result.analyses) == 2


def test_brackets_are_no_record(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 10**5)
    with pytest.raises(LbqError, match=r"deep\.json cannot be read as JSON"):
        gather([tmp_path / "deep.json"])


def test_a_benchmark_alone_is_something_to_report(tmp_path: Path) -> None:
    assert gather([stored(tmp_path, "speed.json", {"sweeps": []})]).benchmarks == [{"sweeps": []}]


def test_names_say_the_batch_where_nothing_else_tells_runs_apart(tmp_path: Path) -> None:
    for i, (batch, epochs) in enumerate([(64, 300), (256, 300), (64, 60)]):
        made = record(weights_sha256=f"{i:064d}", batch_size=batch, epochs=epochs)
        made["config"] = {**made["config"], "train": {"batch_size": batch, "epochs": epochs}}
        stored(tmp_path, f"{i}.json", made)
    results = gather([tmp_path]).results
    assert [(r.title, r.plain) for r in results] == [("LBQ, batch 64", True), ("LBQ, batch 256", True), ("LBQ", True)]
    assert names(results) == ["LBQ, batch 64, 300 ep", "LBQ, batch 256, 300 ep", "LBQ, 60 ep"]


@pytest.mark.parametrize("shown", ["dataset", "model", "timesteps", "n_max", "epochs"])
def test_names_leave_the_batch_out_where_something_else_tells_runs_apart(tmp_path: Path, shown: str) -> None:
    first = record(weights_sha256="a" * 64, batch_size=64)
    other = "mlp" if isinstance(first[shown], str) else first[shown] + 1
    second = {**first, "weights_sha256": "b" * 64, "batch_size": 256, shown: other}
    results = gather([stored(tmp_path, f"{i}.json", made) for i, made in enumerate((first, second))]).results
    assert [r.batch_told for r in results] == [False, False]


def test_names_say_the_learning_rate_where_the_batch_does_not_tell_runs_apart(tmp_path: Path) -> None:
    for i, (batch, lr, factor) in enumerate([(64, 0.025, 1.0), (256, 0.1, 1.0), (256, 0.2, 0.5)]):
        made = record(weights_sha256=f"{i:064d}", batch_size=batch, lr=lr)
        made["config"] = {**made["config"], "train": {"batch_size": batch}, "optim": {"lr": lr, "neuron_lr": factor}}
        stored(tmp_path, f"{i}.json", made)
    results = gather([tmp_path]).results
    assert [r.title for r in results] == [
        "LBQ, batch 64",
        "LBQ, lr 0.1, batch 256",
        "LBQ, lr 0.2, neurons' lr × 0.5, batch 256",
    ]
    assert [r.plain for r in results] == [True, True, False]
    unknown = {k: v for k, v in record(weights_sha256="f" * 64, batch_size=256).items() if k != "lr"}  # an older record
    stored(tmp_path, "3.json", unknown)
    assert [r.lr_told for r in gather([tmp_path]).results] == [False, True, True, False]


def test_a_repeat_says_its_batch_too(tmp_path: Path) -> None:
    for i, batch in enumerate((64, 256, 64)):
        made = record(weights_sha256=f"{i:064d}", batch_size=batch)
        made["config"] = {**made["config"], "train": {"batch_size": batch}}
        stored(tmp_path, f"{i}.json", made)
    assert [r.title for r in gather([tmp_path]).results] == [
        "LBQ, batch 64",
        "LBQ, batch 256",
        "LBQ, run 2, batch 64",
    ]


def test_names_say_whatever_setting_tells_runs_apart(tmp_path: Path) -> None:
    for i, (seed, cutout) in enumerate([(0, 0), (0, 3), (1, 3)]):
        made = record(weights_sha256=f"{i:064d}", seed=seed)
        made["config"]["augment"]["cutout"] = cutout
        made["config"]["train"]["checkpoint_minutes"] = 1.0 + i
        stored(tmp_path, f"{i}.json", made)
    found = gather([tmp_path])
    assert [(g.title, g.n) for g in found.groups] == [("LBQ, augment.cutout 0", 1), ("LBQ, augment.cutout 3", 2)]
    assert [r.title for r in gather([tmp_path / "1.json", tmp_path / "2.json"]).results] == ["LBQ", "LBQ"]


def test_epochs_of_sam_are_told(tmp_path: Path) -> None:
    for i, (sam, epochs) in enumerate([(0.0, 20), (0.05, 20), (0.05, 0)]):
        made = record(weights_sha256=f"{i:064d}")
        made["config"]["optim"] |= {"sam": sam, "sam_epochs": epochs}
        stored(tmp_path, f"{i}.json", made)
    titles = ["LBQ", "LBQ, SAM 0.05 in the last 20 epochs", "LBQ, SAM 0.05"]
    assert [r.title for r in gather([tmp_path]).results] == titles


def test_names_say_what_networks_are_shown_whatever_else_tells_them_apart(tmp_path: Path) -> None:
    runs = [
        (2, "resnet8w2", 8, "count"),
        (4, "resnet8w2", 17, "count"),
        (4, "resnet8w2", 17, "time"),
        (4, "mlp", 9, "count"),
    ]
    for i, (timesteps, model, size, frames) in enumerate(runs):
        made = record(weights_sha256=f"{i:064d}", dataset="nmnist", model=model, timesteps=timesteps)
        made["config"]["data"] |= {"size": size, "frames": frames}
        made["config"]["augment"]["cutout"] = i  # which is told of runs that would be called the same alone
        stored(tmp_path, f"{i}.json", made)
    assert [r.title for r in gather([tmp_path]).results] == [
        'LBQ, data.size 8, data.frames "count"',
        'LBQ, data.size 17, data.frames "count", augment.cutout 1',
        'LBQ, data.size 17, data.frames "time", augment.cutout 2',
        "LBQ",  # of another network
    ]
    assert [r.title for r in gather([tmp_path / "0.json", tmp_path / "3.json"]).results] == ["LBQ", "LBQ"]


def test_names_say_the_file_where_many_settings_tell_runs_apart(tmp_path: Path) -> None:
    folder = runs_folder() / "lbq-0"
    other = record(weights_sha256="f" * 64)
    other["config"]["augment"] |= {"flip": True, "cutout": 3, "crop": 1, "policy": "cifar10"}
    other["analysis"] = analysis()
    other["analysis"]["facts"]["weights_sha256"] = "f" * 64
    found = gather([folder, stored(tmp_path, f"{'x' * 200}.json", other)], read)
    assert [r.title for r in found.results] == ["LBQ, lbq-0", f"LBQ, {'x' * 200}"]
    assert all(len(figure.id) < 200 for figure in layer_figures(found))


def test_a_run_whose_neuron_is_not_known_here_is_named(tmp_path: Path) -> None:
    shutil.copytree(runs_folder() / "lbq-0", tmp_path / "own")
    config = tmp_path / "own" / "config.toml"
    config.write_text(config.read_text().replace('name = "lbq"', 'name = "mine"'))
    (tmp_path / "own" / "result.json").unlink()  # which names the configuration
    with pytest.raises(LbqError, match=r"^.*/own: unknown neuron 'mine'; known: .* .one of your own: lbq --import"):
        gather([tmp_path], read)


def test_a_recipe_that_is_told_hides_no_other_setting(tmp_path: Path) -> None:
    other = record(weights_sha256="f" * 64)
    other["config"]["augment"] |= {"mixup": 0.4, "cutout": 3}
    found = gather([runs_folder() / "lbq-0", stored(tmp_path, "other.json", other)], read)
    assert [r.title for r in found.results] == ["LBQ, augment.cutout 0", "LBQ, mixup 0.4, augment.cutout 3"]
    without, published = (record(dataset="imagenet", weights_sha256=c * 64) for c in "ab")
    published["config"]["augment"] |= {"mixup": 0.8}  # which alone would not be told there
    found = gather([stored(tmp_path, "a.json", without), stored(tmp_path, "b.json", published)])
    assert [r.title for r in found.results] == ["LBQ, augment.mixup 0.0", "LBQ, augment.mixup 0.8"]


def test_a_batch_that_is_not_known_is_not_told(tmp_path: Path) -> None:
    """As of an analysis without its run."""
    unknown = record(weights_sha256="a" * 64)
    unknown.pop("batch_size")
    known = [record(weights_sha256=str(i) * 64, batch_size=batch) for i, batch in enumerate((64, 256))]
    for i, made in enumerate(known):
        made["config"] = {**made["config"], "train": {"batch_size": i}}
    paths = [stored(tmp_path, f"{i}.json", made) for i, made in enumerate([unknown, *known])]
    assert [r.title for r in gather(paths[:2]).results] == ["LBQ", "LBQ"]
    assert [r.title for r in gather(paths).results] == ["LBQ", "LBQ, batch 64", "LBQ, batch 256"]


def test_what_changes_no_result_makes_no_other_group(tmp_path: Path) -> None:
    paths = seeds(tmp_path, [95.0, 96.0, 96.5, 97.0])
    settings = (("checkpoint_minutes", 9.0), ("cuda_graph", False), ("eval_every", 20), ("epochs", 99))
    for path, (key, value) in zip(paths, settings, strict=True):
        made = json.loads(path.read_text())
        made["config"]["train"][key] = value
        path.write_text(json.dumps(made))
    assert [g.n for g in gather(paths).groups] == [3, 1]
    paths = paths[1:]
    made["versions"] = {"kernel": "reference"}
    paths[2].write_text(json.dumps({**made, "config": {**made["config"], "train": {}}}))
    paths[1].write_text(json.dumps({**json.loads(paths[1].read_text()), "config": {**made["config"], "train": {}}}))
    assert [g.title for g in gather(paths[1:]).groups] == ["LBQ", "LBQ, reference kernel"]


def test_another_configuration_is_another_group(tmp_path: Path) -> None:
    paths = seeds(tmp_path, [95.0, 96.0])
    other = record(weights_sha256="f" * 64)
    other["config"] = {**other["config"], "optim": {"lr": 7.0}}
    groups = gather([*paths, stored(tmp_path, "other.json", other)]).groups
    assert [g.n for g in groups] == [2, 1]
    assert groups[1].sd is None


def test_folders_of_runs_and_records(tmp_path: Path) -> None:
    seeds(tmp_path, [95.0, 96.0])
    assert len(gather([tmp_path]).results) == 2
    found = gather([runs_folder()], read)
    assert [Path(r.source).name for r in found.results] == ["ann", "half", "lbq-0", "lbq-1"]
    assert [Path(r.source).name for r in found.unfinished] == ["half"]
    assert sorted(g.n for g in found.groups) == [1, 2]  # two seeds of LBQ, one ANN; what is not finished is in none
    (artefact,) = found.artefacts
    assert artefact.name == "model.lbq"


def test_an_analysis_finds_its_run(tmp_path: Path) -> None:
    made = analysis()
    paths = [stored(tmp_path, "r.json", record()), stored(tmp_path, "a.json", made)]
    (result,) = gather(paths).results
    assert result.analysis is not None
    assert result.analysis.images == made["images"] == 599
    # alone it stands for itself
    (alone,) = gather(paths[1:]).results
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
    made = analysis()
    facts = {**made["facts"], "kind": "artefact", "data": made["facts"]["dataset"]}
    own = {**made, "accuracy": 100.0, "images": 99_999, "facts": {**facts, "data": "mine.npz"}}
    paths = [
        stored(tmp_path, f"{i}.json", v)
        for i, v in enumerate((record(), own, {**made, "accuracy": 91.0, "facts": facts}))
    ]
    (result,) = gather(paths[:2]).results
    assert (result.integer_accuracy, images_cells(Group([result]))[0].text) == (None, "99,999 of mine.npz")
    assert any("99,999 images of mine.npz" in figure.caption for figure in layer_figures(Gathered([result])))
    (result,) = gather(paths).results
    assert (result.integer_accuracy, images_cells(Group([result]))[0].text) == (91.0, "599")


def test_networks_of_a_users_own_are_called_after_their_files(tmp_path: Path) -> None:
    """Which name neither dataset nor model, and say nothing of their training."""
    made = analysis()
    unknown = {"kind": "artefact", "dataset": "", "model": "", "variant": "deployed", "weights_sha256": "", "epochs": 0}
    folders = [tmp_path / name for name in ("small", "large")]
    for folder in folders:
        folder.mkdir()
        facts = {**made["facts"], **unknown, "name": f"{folder.name}.lbq", "data": "mine.npz", "config_hash": ""}
        stored(folder, "analysis.json", {**made, "facts": facts})
    found = gather(folders)
    rows = [[cell.text for cell in row.cells] for row in runs_table(found).rows]
    assert [[*row[:3], row[5], row[-1]] for row in rows] == [
        ["deployed", "mine.npz", f"{name}.lbq", "", f"{name}/analysis.json"] for name in ("small", "large")
    ]
    assert all(result.alone and result.recipe == "epochs not known" for result in found.results)


def test_a_network_that_was_deployed_over_other_timesteps_is_another(tmp_path: Path) -> None:
    made = analysis()
    facts = {**made["facts"], "kind": "artefact", "data": made["facts"]["dataset"]}
    values = (record(), *({**made, "accuracy": 90.0 + t, "facts": {**facts, "timesteps": t}} for t in (1, 2)))
    run, other = gather([stored(tmp_path, f"{i}.json", value) for i, value in enumerate(values)]).results
    assert (run.alone, run.record["timesteps"], run.integer_accuracy) == (False, 2, 92.0)
    assert (other.alone, other.record["timesteps"], other.integer_accuracy) == (True, 1, 91.0)


def test_networks_of_unlike_bits_have_no_mean(tmp_path: Path) -> None:
    made = analysis()
    facts = {**made["facts"], "kind": "artefact", "data": made["facts"]["dataset"]}
    told = []
    for bits in ((8, 8), (4, 4), (8, 4)):
        for seed, b in enumerate(bits):
            weights = f"{seed:064d}"
            stored(tmp_path, f"r{seed}.json", record(seed=seed, weights_sha256=weights))
            here = {**facts, "bits": b, "weights_sha256": weights}
            stored(tmp_path, f"a{seed}.json", {**made, "accuracy": 90.0 + 2 * seed, "facts": here})
        (group,) = gather([tmp_path]).groups
        told.append(integer_cell(group).text)
    assert told == ["91.00 ± 1.41", "91.00 ± 1.41 (4 bits)", ""]


def test_golden_inputs_are_no_test_set(tmp_path: Path) -> None:
    made = analysis()
    golden = {**made, "images": 8, "facts": {**made["facts"], "kind": "artefact", "data": "golden inputs"}}
    with pytest.raises(
        LbqError, match=r"g.json is of 8 golden inputs.*make it again with lbq analyze model.lbq --data"
    ):
        gather([stored(tmp_path, "r.json", record()), stored(tmp_path, "g.json", golden)])


def test_what_lies_beside_a_run_is_found_once(tmp_path: Path) -> None:
    shutil.copytree(runs_folder() / "lbq-0", tmp_path / "run")
    shutil.copytree(runs_folder() / "ann", tmp_path / "run" / "baselines" / "ann")
    (tmp_path / "run" / "baselines" / "notes").mkdir()
    made = json.loads((tmp_path / "run" / "analysis" / "analysis.json").read_text())
    (tmp_path / "run" / "model.analysis").mkdir()
    stored(
        tmp_path / "run" / "model.analysis", "analysis.json", {**made, "facts": {**made["facts"], "kind": "artefact"}}
    )
    for given in ([tmp_path / "run"], [tmp_path], [tmp_path / "run" / "baselines" / "ann", tmp_path / "run"]):
        found = gather(given, read)
        assert sorted(r.title for r in found.results) == ["ANN", "LBQ"]
        (run,) = [r for r in found.results if r.title == "LBQ"]
        assert [a.deployed for a in run.analyses] == [False, True]
    stale = {**made, "facts": {**made["facts"], "kind": "artefact", "weights_sha256": "f" * 64}}
    stored(tmp_path / "run" / "model.analysis", "analysis.json", stale)
    with pytest.raises(
        LbqError, match=r"model.analysis.analysis\.json is of other weights than .*run holds: deploy the run"
    ):
        gather([tmp_path], read)


def test_an_integer_record_finds_its_run(tmp_path: Path) -> None:
    integer = {"of": "r.json", "test_accuracy": 93.5, "arithmetic": "integer: 8-bit"}
    paths = [stored(tmp_path, "i.json", integer), stored(tmp_path, "r.json", record())]
    found = gather(paths)
    assert found.results[0].integer == integer
    (row,) = runs_table(found).rows
    assert [c.text for c in row.cells if c.hint.startswith("integer")] == ["93.50"]
    with pytest.raises(LbqError, match="give that record too"):
        gather(paths[:1])


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
    with pytest.raises(LbqError, match="does not exist"):
        gather([tmp_path / "nowhere"])
    with pytest.raises(LbqError, match="holds no runs and no records"):
        gather([tmp_path])
    with pytest.raises(LbqError, match="nothing to report"):
        gather([])
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(LbqError, match="neither a record"):
        gather([tmp_path / "x.txt"])
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(LbqError, match="cannot be read as JSON"):
        gather([tmp_path / "x.json"])
    with pytest.raises(LbqError, match="make a record of it"):
        gather([runs_folder() / "lbq-0"])


def test_twins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LbqError, match="same run: give it once"):
        gather([stored(tmp_path, "b.json", record()), stored(tmp_path, "c.json", record())])


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
        ({"log": [{"epoch": 1}]}, r"log\[0\].loss is missing"),
        ({"log": [{"epoch": 1, "loss": 10**400}]}, r"log\[0\].loss must be a number, not 1000"),
        ({"config": {"neuron": 5}}, "config.neuron must be an object, not 5"),
        ({"config": {"neuron": {"n_max": 0}}}, "config.neuron.n_max must be a whole number above 0, not 0"),
        ({"log": {}}, "log must be a list, not {}"),
        ({"config": []}, r"config must be an object, not \[\]"),
        ({"config": {"optim": 3}}, "config.optim must be an object, not 3"),
        ({"config": {"optim": {"neuron_lr": "x"}}}, "config.optim.neuron_lr must be a number, not 'x'"),
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"batch_size": [64]}, r"batch_size must be a whole number above 0, not \[64\]"),
        ({"steps": {"sn1": "x" * 99}}, "steps.sn1 must be a number, not 'xxx.*\\.\\.\\."),
        ({"test_accuracy": math.nan}, "test_accuracy must be a number from 0 to 100, not nan"),
        ({"test_accuracy": 900}, "test_accuracy must be a number from 0 to 100, not 900"),
        ({"test_accuracy": None}, "test_accuracy must be a number from 0 to 100, not None"),
        ({"holdout_accuracy": 101}, "holdout_accuracy must be a number from 0 to 100, not 101"),
        (
            {"log": [{"epoch": 1, "loss": 1, "holdout_accuracy": "x"}]},
            r"log\[0\].holdout_accuracy must be a number, not 'x'",
        ),
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


def test_a_damaged_record_of_integers(tmp_path: Path) -> None:
    whole = stored(tmp_path, "a.json", record())
    for accuracy in (101, math.nan, "high"):
        with pytest.raises(LbqError, match=r"b.json is damaged: test_accuracy must be a number from 0 to 100"):
            gather([whole, stored(tmp_path, "b.json", {"of": "a.json", "test_accuracy": accuracy})])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("layers.0.membrane", {"counts": [[1]], "thresholds": []}, r"layers\[0\].membrane.thresholds must be a list"),
        ("layers.0.membrane", {"counts": [[1]], "thresholds": [1.0]}, r"layers\[0\].membrane.counts must have 72 bins"),
        ("layers.0.membrane", {"counts": [[1]]}, r"layers\[0\].membrane.thresholds is missing"),
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


def test_settings_that_came_later_make_no_other_configuration_at_their_defaults() -> None:
    whole = Config().to_dict()
    older = {part: dict(values) if isinstance(values, dict) else values for part, values in whole.items()}
    for part, defaults in LATER.items():
        for key in defaults:
            del older[part][key]
    assert Result(record(config=older), "x").key == Result(record(config=whole), "x").key
    for part, key in (("augment", "plain_epochs"), ("optim", "norm_decay"), ("optim", "sam")):
        changed = {**whole, part: {**whole[part], key: 1}}
        assert Result(record(config=changed), "x").key != Result(record(config=whole), "x").key
    unused = {**whole, "optim": {**whole["optim"], "sam_epochs": 1}}  # of no epoch, since sam is 0
    assert Result(record(config=unused), "x").key == Result(record(config=whole), "x").key


def test_titles() -> None:
    def title(**changes: Any) -> str:
        return Result(record(**changes), "x").title

    assert title(step_gradient="lsq") == "LBQ, LSQ step gradient"
    assert title(variant="v3", surrogate="box_et") == "V3 (learned + box-ET)"
    assert title(variant="mine") == "mine"
    assert title(config={"optim": {"norm_decay": True}}) == "LBQ, BN decayed"
    assert title(config={"augment": {"plain_epochs": 15}}) == "LBQ, last 15 epochs plain"
    ternary = {"variant": "ternary_fixed", "step": "fixed", "surrogate": "box"}
    assert title(**ternary, config={"neuron": {"step": 0.5}}) == "Ternary, fixed, step 0.5"
    assert title(**ternary, config={"neuron": {"step": 1.0}}) == "Ternary, fixed"
    assert title(config={"neuron": {"n_max": 5, "step": 0.3, "beta": 0.9}}) == "LBQ, step from 0.3, beta 0.9"
    assert title(config={"neuron": {"n_max": 5, "step": 0.4, "beta": 0.5}}) == "LBQ"
    assert title(variant="burst_fixed") == "Burst, fixed step"
    assert title(variant="burst_learned", surrogate="arctan") == "Burst, learned step, arctan"
    assert title(config={"model": {"share_tail": True}}) == "LBQ, one tail for all layers"
    assert title(config={"neuron": {"name": "lbq", "learn_tail": False}}) == "LBQ, fixed tails"
    assert (
        title(variant="v3", surrogate="box", config={"neuron": {"name": "v3", "learn_tail": False}})
        == "V3 (learned + box)"
    )
    assert title(versions={"kernel": "reference"}) == "LBQ, reference kernel"
    assert title(config={"optim": {"neuron_lr": 0.1}}) == "LBQ, neurons' lr × 0.1"
    assert title(config={"optim": {"neuron_lr": 1.0}}) == "LBQ"
    assert title(config={"train": {"ema": 0.999}}) == "LBQ, averaged weights"
    assert title(config={"train": {"ema": 0.0}}) == "LBQ"
    other = {
        "optim": {"name": "adamw", "clip": 1.0},
        "train": {"loss": "tet", "init_from": "runs/start"},
        "augment": {"mixup": 0.5, "label_smoothing": 0.1, "cutmix": 0.0},
        "data": {"holdout": 0.1},
    }
    told = "AdamW, TET loss, mixup 0.5, label smoothing 0.1, gradients clipped at 1.0, 0.1 of the training set held out"
    assert title(config=other) == f"LBQ, {told}, from trained weights"
    assert title(config=other, init_sha256="12345678" * 8) == f"LBQ, {told}, from trained weights 12345678"
    assert not Result(record(config={"train": {"loss": "tet"}}), "x").plain
    published = {"optim": {"name": "adamw"}, "augment": {"mixup": 0.5, "label_smoothing": 0.1}}
    assert title(config=published, dataset="cifar10_dvs") == "LBQ"  # as the paper has it there
    assert title(config=published, dataset="cifar100") == "LBQ, AdamW, mixup 0.5, label smoothing 0.1"


def test_defaults_that_are_spelt_out_are_the_same_settings() -> None:
    def run(seed: int, neuron: dict[str, Any], size: int = 0) -> Result:
        made = of_cifar()
        config = {**made.record["config"], "seed": seed, "neuron": neuron, "data": {"name": "cifar10", "size": size}}
        return replace(made, record={**made.record, "seed": seed, "weights_sha256": str(seed) * 64, "config": config})

    spelt = {"name": "lbq", "n_max": 5, "step": 0.4, "beta": 0.5, "surrogate": "relsg_et"}
    runs = [run(0, {"name": "lbq"}), run(1, spelt, 32), run(2, {"name": "lbq", "n_max": 5})]
    assert [len(group.results) for group in Gathered(runs).groups] == [3]
    other = [run(3, {**spelt, "beta": 0.25}), run(4, {**spelt, "step": 0.2}), run(5, {**spelt, "learn_tail": False})]
    assert [len(group.results) for group in Gathered([*runs, *other]).groups] == [3, 1, 1, 1]
    whole = [run(6, {**spelt, "beta": 1}), run(7, {**spelt, "beta": 1.0})]
    assert [len(group.results) for group in Gathered(whole).groups] == [2]
    ladders = [run(8, {"name": "ladder", "thresholds": [1, 2]}), run(9, {"name": "ladder", "thresholds": [1.0, 2.0]})]
    assert [len(group.results) for group in Gathered(ladders).groups] == [2]


def test_runs_from_other_weights_are_no_seeds_of_one_setting() -> None:
    """Whatever lay in the folder of that name."""

    def run(seed: int, start: str, folder: str = "start") -> Result:
        made = of_cifar()
        config = {**made.record["config"], "train": {**made.record["config"]["train"], "init_from": folder}}
        said = {"seed": seed, "weights_sha256": str(seed) * 64, "init_sha256": start, "config": config}
        return replace(made, record={**made.record, **said})

    runs = [run(0, "a" * 64), run(1, "b" * 64), run(2, "a" * 64, "moved")]
    assert [len(group.results) for group in Gathered(runs).groups] == [2, 1]


def test_runs_on_other_data_are_no_seeds_of_one_setting() -> None:
    def run(seed: int, **changes: Any) -> Result:
        made = of_cifar()
        return replace(made, record={**made.record, "seed": seed, "weights_sha256": str(seed) * 64, **changes})

    runs = [run(0, data_sha256="a"), run(1, data_sha256="b"), run(2, data_sha256="a", split="another")]
    assert [len(group.results) for group in Gathered(runs).groups] == [1, 1, 1]


def test_one_level_is_not_the_papers_five() -> None:
    one = of_cifar(n_max=1)
    assert not one.plain
    assert "N_max = 1" in title_at(Group([one]))
    assert of_cifar(variant="lif", n_max=1, surrogate="arctan").has_usual_levels
    assert of_cifar(variant="lif", n_max=1, surrogate="sigmoid").title == "Binary LIF, sigmoid"


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


def test_usual_settings_are_the_neurons_defaults() -> None:
    defaults = {name: p.default for name, p in inspect.signature(BurstNeuron).parameters.items()}
    for name, value in {**USUAL, **UNNAMED}.items():
        if name != "per_channel":  # which configurations say in place of channels
            assert defaults[name] == value, name


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
    assert names([run(2, static=False), run(6, static=False, **ann)]) == ["LBQ, T=2", "ANN, T=6"]


def test_titles_say_a_switch_in_words() -> None:
    made = of_cifar()
    neuron = {**made.record["config"]["neuron"], "learn_beta": True, "alpha": 0.9, "reset_grad": False}
    other = replace(made, record={**made.record, "config": {**made.record["config"], "neuron": neuron}})
    assert other.kind == "LBQ, alpha 0.9, learned beta, no gradient through the reset"


def test_other_neurons_have_other_defaults() -> None:
    def run(seed: int, neuron: dict[str, Any]) -> Result:
        made = of_cifar(variant="ilif", n_max=5)
        config = {**of_cifar().record["config"], "neuron": {"name": "ilif", **neuron}}
        return replace(made, record={**made.record, "seed": seed, "weights_sha256": str(seed) * 64, "config": config})

    assert len(Gathered([run(0, {}), run(1, {"beta": 0.5}), run(2, {"step": 0.4})]).groups) == 3


def test_older_records_do_not_name_their_data() -> None:
    def run(seed: int, data: str) -> Result:
        made = of_cifar()
        return replace(
            made, record={**made.record, "seed": seed, "weights_sha256": str(seed) * 64, "data_sha256": data}
        )

    runs = [run(0, ""), run(1, "a"), run(2, "b"), run(3, "a")]
    assert [[r.record["seed"] for r in group.results] for group in Gathered(runs).groups] == [[0, 1, 3], [2]]
