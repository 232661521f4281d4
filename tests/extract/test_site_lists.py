"""Layers and sites: one by one, in lists, in ranges; what is none is refused before a lake is made."""

from __future__ import annotations

import itertools
import json

import pytest
from layerlake.__main__ import app
from layerlake.errors import RequestError
from layerlake.extract.driver import extract
from typer.testing import CliRunner


def test_layers_and_sites_are_given_one_by_one_or_in_lists(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 3, 2]}\n')
    base = ["extract", "toy_models:lstm", str(tmp_path / "d.jsonl"), "--lake", str(tmp_path / "lake"), "--json"]

    numbers = itertools.count()

    def arrays(*options: str) -> list[str]:
        done = CliRunner().invoke(app, [*base, "--run", f"r{next(numbers)}", *options])
        assert done.exit_code == 0, done.output
        return json.loads(done.output)["arrays"]

    assert arrays("--layers", "0-1,2", "--sites", "resid_post") == [f"resid_post-{i}" for i in range(3)]
    assert arrays("--layer", "2", "--layer", "0", "--site", "embed,resid_post") == [
        "embed",
        "resid_post-0",
        "resid_post-2",
    ]
    assert arrays("--site", "embed", "--site", "resid_post", "--layers", " 1 , 1 ") == ["embed", "resid_post-1"]
    report = extract(
        "toy_models:lstm", tmp_path / "d.jsonl", tmp_path / "lake", run="py", layers="1-2", sites="resid_post"
    )
    assert report.arrays == ["resid_post-1", "resid_post-2"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", "0-99"], "no layer '3' of site 'resid_post'. Known: 0, 1, 2."),
        (["--layer", "99"], "no layer '99' of site 'resid_post'. Known: 0, 1, 2."),
        (["--layer", "-1"], "no layer '-1' of site 'resid_post'. Known: 0, 1, 2."),
        (["--layers", "2-1"], "'2-1' is no layer: write numbers from 0, lists and ranges, such as 0,3,5-8."),
        (["--layers", "0,,1"], "'' is no layer"),
        (["--layers", "0-999999999"], "'0-999999999' is no layer"),
        (["--layer", "layer.3"], "'layer.3' is no layer: write numbers from 0"),
        (["--site", "layer.3"], "no site 'layer.3' in this model. Did you mean 'rnn.layers."),
        (["--sites", "embed,model.layers.3"], "no site 'model.layers.3' in this model. Did you mean 'rnn.layers."),
        (["--sites", "embed,resid_pos"], "Did you mean 'resid_post'?"),
        (["--sites", ","], "Name at least one site"),
    ],
)
def test_U01_wrong_layers_and_sites_are_refused_with_those_there_are(tmp_path, options, says):
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 3, 2]}\n')
    command = ["extract", "toy_models:lstm", str(tmp_path / "d.jsonl"), "--lake", str(tmp_path / "lake"), *options]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, RequestError) and done.exception.exit_code == 2
    assert says in str(done.exception)
    assert not (tmp_path / "lake").exists()
