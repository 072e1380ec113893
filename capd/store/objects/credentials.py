"""The credentials of an object store: from the environment and the files of its own tools, never from a command line.

obstore itself reads the variables of the three clouds (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_…,
AZURE_STORAGE_…), the roles of containers and of machines, and web identities. It reads no profile of ~/.aws. So the
static keys and the region of a profile are read here. Any other kind of profile needs boto3.
"""

from __future__ import annotations

import configparser
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capd.errors import ConfigError
from capd.store.objects.address import Address

__all__ = ["store_options"]

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
    "endpoint_url": "endpoint",
}
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")


def store_options(address: Address, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options of obstore that the environment alone does not give it.

    Raises:
        ConfigError: AWS_PROFILE names no profile, or one that cannot be read here.
    """
    if address.scheme != "s3":
        return {}
    for name in _ENDPOINTS:
        # obstore panics without a scheme.
        if environ.get(name) and not environ[name].startswith(("http://", "https://")):
            raise ConfigError(f"{name} is no address of a server; write https://HOST or http://HOST:PORT")
    found = _profile(environ) if "AWS_ACCESS_KEY_ID" not in environ else {}
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environ.keys():
        # obstore demands a region, and servers other than AWS do not care.
        found.setdefault("region", "us-east-1")
    else:
        found.pop("region", None)
    if {*_ENDPOINTS} & environ.keys():
        found.pop("endpoint", None)
    return found


def _profile(environ: Mapping[str, str]) -> dict[str, Any]:
    named = environ.get("AWS_PROFILE")
    profile = named or "default"
    home = Path(environ.get("HOME", "/"))
    parser = configparser.RawConfigParser()
    places = {
        Path(environ.get("AWS_CONFIG_FILE") or home / ".aws/config"): f"profile {profile}",
        Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials"): profile,
    }
    found: dict[str, Any] = {}
    is_known = False
    for file, section in places.items():
        parser.clear()
        try:
            parser.read(file)
        except (configparser.Error, UnicodeDecodeError) as error:
            # The text of the error would quote a line, and with it a key.
            raise ConfigError(
                f"{file} cannot be read as a file of AWS profiles ({type(error).__name__})"
            ) from None
        # The default profile has no prefix in either file.
        section = profile if profile == "default" else section
        if parser.has_section(section):
            is_known = True
            found |= {
                ours: parser[section][theirs] for theirs, ours in _KEYS.items() if theirs in parser[section]
            }
    if named and not is_known:
        raise ConfigError(
            f"AWS_PROFILE names the profile {named!r}, which {' and '.join(map(str, places))} lack"
        )
    if named and "access_key_id" not in found:
        return {**found, "credential_provider": _boto3_provider(named)}
    return found


def _boto3_provider(profile: str) -> Any:
    try:
        boto3: Any = importlib.import_module("boto3")
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise ConfigError(
            f"the AWS profile {profile!r} has no static keys, and to follow it takes boto3: pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from None
    return Boto3CredentialProvider(boto3.Session(profile_name=profile))
