"""`ddaudit probe`: what a model really looks like, from its configuration alone."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ddaudit.auditor.profile import Profile, load_profile, profile_names, write_profile
from ddaudit.auditor.reports.probe_report import as_text


@click.command(short_help="Say where a model keeps its parts and state; no weights are read.")
@click.argument("model", required=False)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--save", "target", type=click.Path(path_type=Path), help="Write the profile, for `scan --target`.")
@click.option("--trust-remote-code", is_flag=True, help="Let code run that comes with the model.")
@click.option("--built-in", is_flag=True, help="Compare every built-in profile with a fresh probe; `--save` rewrites.")
def probe(model: str | None, form: str, target: Path | None, trust_remote_code: bool, built_in: bool) -> None:
    """Build MODEL on the `meta` device and report, for each class that a loader makes of it, where it keeps its
    embeddings, head, layers and configuration, and what its cache and state are.

    MODEL is a folder with a config.json, a hub id, a built-in profile, a model type of Transformers such as
    `qwen3_next`, or a configuration class such as `JambaConfig`.

    Exit code 0: done, 1: a built-in profile differs from the probe, 2: the model cannot be built.
    """
    if built_in == bool(model):
        raise click.UsageError("name one model, or `--built-in` for every built-in profile")
    runtime = load_runtime("probe")
    if built_in:
        _built_in(runtime, target)
        return
    assert model is not None
    profile = run_probe(runtime, model, trust_remote_code)
    click.echo(json.dumps(as_json(profile), indent=2) if form == "json" else as_text(profile))
    if target is not None:
        write_profile(replace(profile, name=target.stem), target)
        click.echo(f"profile: {target}", err=True)


def _built_in(runtime: Any, folder: Path | None) -> None:
    differing = 0
    for name in profile_names():
        found = run_probe(runtime, name)
        if folder is not None:
            write_profile(found, folder / f"{name}.json")
            click.echo(f"{name}: written")
            continue
        different = differences(load_profile(name), found)
        differing += bool(different)
        click.echo(f"{name}: {'; '.join(different) or 'the same'}")
    if differing:
        raise click.exceptions.Exit(1)


def differences(known: Profile, found: Profile) -> list[str]:
    """The facts that are not the same, by class and name."""
    olds, news = known.to_json()["facts"]["classes"], found.to_json()["facts"]["classes"]
    if [each["name"] for each in olds] != [each["name"] for each in news]:
        return [f"the classes are now {', '.join(each['name'] for each in news)}"]
    return [
        f"{new['name']}.{name} is now {new[name]}"
        for old, new in zip(olds, news, strict=True)
        for name in new
        if json.dumps(old.get(name)) != json.dumps(new[name])
    ]


def as_json(profile: Profile) -> dict[str, Any]:
    """The saved form, with the name and the drawing of the layers."""
    data = profile.to_json()
    for facts, each in zip(data["facts"]["classes"], profile.classes, strict=True):
        facts["layer_pattern"] = each.pattern
    return {"name": profile.name, **data}


def load_runtime(name: str) -> Any:
    """A module of the runtime's probing, which is an extra."""
    try:
        return importlib.import_module(f"ddaudit.runtime.probing.{name}")
    except ImportError as error:
        raise click.ClickException(f"{error}; this needs the runtime: pip install 'ddaudit[runtime]'") from error


def run_probe(runtime: Any, model: str, trust_remote_code: bool = False) -> Profile:
    """The probe, with what it cannot do as one line."""
    try:
        profile: Profile = runtime.probe(model, trust_remote_code)
    except runtime.RunError as error:
        raise ValueError(f"{error}; {error.remedy}" if error.remedy else str(error)) from error
    return profile
