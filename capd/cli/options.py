"""The declaration of options, alone and in groups, and the options that verbs of all kinds share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from capd.errors import ConfigError
from capd.store.objects.address import is_address

__all__ = ["Command", "Config", "Json", "StoreRoot", "Wide", "flag", "grouped", "local_path", "option"]


def option(name: str, value: str, text: str, *names: str, **more: Any) -> Any:
    """Declare an option with a value.

    Args:
        name: The option, such as "--out".
        value: The name of its value in the help, such as "DIR".
        text: The help.
        names: Other names, such as "-o".
        more: Further arguments of `typer.Option`.

    Returns:
        The declaration, for the `Annotated` type of a parameter.
    """
    return typer.Option(name, *names, metavar=value, help=text, **more)


def flag(name: str, text: str, *names: str, **more: Any) -> Any:
    """Declare an option without a value. The arguments are the same as those of `option`."""
    return typer.Option(name, *names, help=text, **more)


def local_path(text: str) -> Path:
    """Return the path that an argument names, for a command that only works on this machine.

    Raises:
        ConfigError: It is an address of an object store.
    """
    if is_address(text):
        raise ConfigError(
            f"{text} is in an object store, and this command works on runs of this machine alone; "
            "`capd cp` brings a run here"
        )
    return Path(text)


Wide = Annotated[bool, flag("--wide", "Shorten and leave out nothing to fit the terminal.")]
Json = Annotated[bool, flag("--json", "Print JSON.")]
Command = Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The job and its arguments.")]
StoreRoot = Annotated[
    Path | None,
    option("--store", "DIR", "Directory that holds the runs [default: captures].", parser=local_path),
]
Config = Annotated[
    Path | None,
    option("--config", "FILE", "Settings file [default: CAPD_CONFIG, or ./capd.toml if it exists]."),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its groups, and hand it the groups with these values.

    A group is a parameter whose type is a dataclass. The type of each field declares an option, or is a group itself.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = signature.parameters.values()
    options = [one for parameter in parameters for one in _options_of(parameter)]

    @wraps(command)
    def with_options(**given: Any) -> None:
        command(**{parameter.name: _value(parameter, given) for parameter in parameters})

    # typer reads the options from the signature and the annotations.
    with_options.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in options}
    return with_options


def _options_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    if not is_dataclass(parameter.annotation):
        return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    return [one for field in _fields(parameter.annotation) for one in _options_of(field)]


def _value(parameter: inspect.Parameter, given: Mapping[str, Any]) -> Any:
    if not is_dataclass(parameter.annotation):
        return given[parameter.name]
    group: Any = parameter.annotation
    return group(**{field.name: _value(field, given) for field in _fields(group)})


def _fields(group: Any) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=types[field.name])
        for field in fields(group)
    ]
