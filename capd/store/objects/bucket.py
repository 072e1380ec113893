"""The objects below one address: they are read, written, listed and deleted.

obstore does the work. Keys are relative to the address. Each call makes one request, but for listings of more than
1,000 objects and for uploads in parts. A call that fails is tried again for some seconds at most: who has more time
repeats the call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Final, Literal

import google_crc32c

from capd.errors import ObjectStoreError
from capd.store.objects.address import Address
from capd.store.objects.credentials import store_options
from capd.store.objects.failures import translated
from capd.store.objects.forked import note_use

__all__ = ["CRC_ATTRIBUTE", "Bucket", "Head", "part_nbytes"]

CRC_ATTRIBUTE: Final = "capd-crc32c"
"""The attribute of an object with the crc32c of its bytes, as eight hexadecimal digits."""

_MIN_PART_NBYTES = 8 << 20
# S3 allows 10,000 parts.
_MAX_PARTS = 9_000
_PARTS_AT_ONCE = 2
# The limits within one call.
_RETRIES = 3
_RETRY_TIMEOUT = timedelta(seconds=20)
# Of a whole request. A part of 16 MiB may share a slow line with others.
_TIMEOUT = timedelta(minutes=5)
_CONNECT_TIMEOUT = timedelta(seconds=10)
_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of an object without its bytes. crc32c: as the writer noted it; None if it did not."""

    key: str
    nbytes: int
    etag: str | None
    crc32c: int | None = None


class Bucket:
    """The objects below an address. Any thread may use it.

    Attributes:
        address: The address.
        requests: The number of calls so far, each of them one request (see the module).
    """

    def __init__(self, address: Address, *, is_new: bool = True) -> None:
        """Prepare the access. No request is made.

        Args:
            address: The address.
            is_new: Whether the directory of a `file` address may be missing. It is then made.

        Raises:
            CapdError: The extra `store` is not installed.
            ConfigError: The settings in the environment are not valid.
            ObjectStoreError: There is no such directory.
        """
        self.address = address
        self.requests = 0
        self._lock = threading.Lock()
        self._prefix = "" if address.scheme == "file" else (address.key and f"{address.key}/")
        self._obs, self._store = _connect(address, is_new=is_new)

    @property
    def keeps_attributes(self) -> bool:
        """Whether objects have attributes. Files have none."""
        return self.address.scheme != "file"

    def obstore(self) -> Any:
        """Return the store object of obstore, for other libraries. Its keys begin with the key of the address."""
        return self._store

    def full_key(self, key: str) -> str:
        """Return the key of an object as `obstore()` has it."""
        return self._prefix + key

    def get(self, key: str, *, at_most: int | None = None) -> bytes:
        """Return an object.

        Args:
            key: The key.
            at_most: The largest size that is read. None: any.

        Raises:
            ObjectStoreError: It is missing, larger, or cannot be read.
        """
        with self._calling(key):
            found = self._obs.get(self._store, self._prefix + key)
            if at_most is not None and found.meta["size"] > at_most:
                raise ValueError(f"it has {found.meta['size']} bytes, more than {at_most}")
            return bytes(found.bytes())

    def get_versioned(self, key: str, *, at_most: int) -> tuple[bytes, str | None]:
        """Return an object and its entity tag, as `get`."""
        with self._calling(key):
            found = self._obs.get(self._store, self._prefix + key)
            if found.meta["size"] > at_most:
                raise ValueError(f"it has {found.meta['size']} bytes, more than {at_most}")
            return bytes(found.bytes()), found.meta["e_tag"]

    def get_into(self, key: str, file: IO[bytes], *, at_most: int) -> int:
        """Write an object into a file in bounded memory, and return the crc32c of its bytes.

        Raises:
            ObjectStoreError: It is missing, larger than `at_most`, or cannot be read.
            OSError: The file cannot be written.
        """
        crc, size = 0, 0
        for piece in self._pieces(key, at_most):
            crc, size = google_crc32c.extend(crc, piece), size + len(piece)
            if size > at_most:
                raise ObjectStoreError(f"{self.address / key}: it has more than {at_most} bytes")
            file.write(piece)
        file.flush()
        return crc

    def _pieces(self, key: str, at_most: int) -> Iterator[bytes]:
        with self._calling(key):
            found = self._obs.get(self._store, self._prefix + key)
            if found.meta["size"] > at_most:
                raise ValueError(f"it has {found.meta['size']} bytes, more than {at_most}")
            for piece in found.stream(min_chunk_size=_PIECE_NBYTES):
                yield bytes(piece)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes start ≤ offset < end of an object; fewer if it ends before.

        Raises:
            ObjectStoreError: It is missing, ends before `start`, or cannot be read.
        """
        with self._calling(key):
            return bytes(self._obs.get_range(self._store, self._prefix + key, start=start, end=end))

    def get_tail(self, key: str, nbytes: int) -> tuple[bytes, int]:
        """Return the last bytes of an object, and its size.

        Raises:
            ObjectStoreError: It is missing or cannot be read.
        """
        with self._calling(key):
            found = self._obs.get(self._store, self._prefix + key, options={"range": {"suffix": nbytes}})
            return bytes(found.bytes()), int(found.meta["size"])

    def head(self, key: str) -> Head | None:
        """Return what is known of an object; None if there is none.

        Raises:
            ObjectStoreError: The store cannot be asked.
        """
        try:
            with self._calling(key):
                found = self._obs.get(self._store, self._prefix + key, options={"head": True})
                return Head(key, int(found.meta["size"]), found.meta["e_tag"], _crc_of(found.attributes))
        except FileNotFoundError:
            return None

    def put(
        self,
        key: str,
        payload: bytes,
        *,
        condition: Literal["create"] | str | None = None,
        crc32c: int | None = None,
    ) -> str | None:
        """Write a small object whole.

        Args:
            key: The key.
            payload: Its bytes.
            condition: "create" writes only if there is no object. Any other text is the entity tag that the object must
                have. None replaces whatever there is.
            crc32c: The checksum that becomes an attribute of the object.

        Returns:
            The entity tag of the new object.

        Raises:
            ObjectStoreError: It cannot be written. `reason` is "conflict" if the condition does not hold.
        """
        mode: Any = None
        if condition is not None:
            mode = "create" if condition == "create" else {"e_tag": condition}
        with self._calling(key):
            done = self._obs.put(
                self._store,
                self._prefix + key,
                payload,
                mode=mode,
                use_multipart=False,
                attributes=self._attributes(crc32c),
            )
            etag: str | None = done["e_tag"]
            return etag

    def put_file(self, key: str, file: Path | Iterator[bytes], nbytes: int, crc32c: int) -> str | None:
        """Write an object from a file, in parts if it is large. It appears whole or not at all.

        An iterator goes in parts whatever its size, and takes the memory of three of them.

        Args:
            key: The key.
            file: A file, or an iterator of its pieces, which may wait to limit the bandwidth.
            nbytes: The size of the file.
            crc32c: The checksum of its bytes, which becomes an attribute of the object.

        Returns:
            The entity tag of the object.

        Raises:
            ObjectStoreError: It cannot be written.
        """
        with self._calling(key):
            done = self._obs.put(
                self._store,
                self._prefix + key,
                file,
                chunk_size=part_nbytes(nbytes),
                max_concurrency=_PARTS_AT_ONCE,
                attributes=self._attributes(crc32c),
            )
            etag: str | None = done["e_tag"]
            return etag

    def listing(self, prefix: str = "") -> Iterator[Head]:
        """Yield the objects whose keys begin with a directory, in order.

        Raises:
            ObjectStoreError: The store cannot be listed.
        """
        with self._calling(prefix):
            for page in self._obs.list(self._store, self._prefix + prefix, chunk_size=1000):
                for one in page:
                    yield Head(one["path"].removeprefix(self._prefix), int(one["size"]), one["e_tag"])

    def names(self, prefix: str = "") -> tuple[list[str], list[Head]]:
        """Return the directories and the objects directly in a directory. One request for up to 1,000 of both.

        Raises:
            ObjectStoreError: The store cannot be listed.
        """
        with self._calling(prefix):
            found = self._obs.list_with_delimiter(self._store, self._prefix + prefix)
            inside = [path.removeprefix(self._prefix).strip("/") for path in found["common_prefixes"]]
            objects = [
                Head(one["path"].removeprefix(self._prefix), int(one["size"]), one["e_tag"])
                for one in found["objects"]
            ]
            return sorted(name.rpartition("/")[2] for name in inside), objects

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. One that is missing is no error.

        Raises:
            ObjectStoreError: They cannot be deleted.
        """
        if not keys:
            return
        with self._calling(keys[0]):
            try:
                self._obs.delete(self._store, [self._prefix + key for key in keys])
            except FileNotFoundError:
                # A file system says so; the others may still be there.
                for key in keys:
                    if os.path.exists(f"/{self.address.key}/{key}"):
                        self._obs.delete(self._store, self._prefix + key)

    def _attributes(self, crc32c: int | None) -> dict[str, str] | None:
        if crc32c is None or not self.keeps_attributes:
            return None
        return {CRC_ATTRIBUTE: f"{crc32c:08x}"}

    def _calling(self, key: str) -> Any:
        note_use(self.address)
        with self._lock:
            self.requests += 1
        return translated(self.address / key if key else self.address)


def part_nbytes(nbytes: int) -> int:
    """Return the bytes of each part in which an object of `nbytes` is written."""
    return max(_MIN_PART_NBYTES, -(-nbytes // _MAX_PARTS))


def _crc_of(attributes: Mapping[Any, Any]) -> int | None:
    text = str(attributes.get(CRC_ATTRIBUTE, ""))
    try:
        return int(text, 16) if len(text) == 8 else None
    except ValueError:
        return None


def _connect(address: Address, *, is_new: bool) -> tuple[Any, Any]:
    """Return the module obstore and a store of it."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        from capd.errors import CapdError

        raise CapdError(f'{address} needs obstore: pip install "capd[store]"') from error
    # Each cloud has its own overload.
    stores: Any = obstore.store
    with translated(address):
        if address.scheme == "file":
            # The directory of a new store must not be readable for others.
            place = Path("/", address.key)
            if not is_new and not place.is_dir():
                raise FileNotFoundError(place)
            return obstore, stores.LocalStore(place, mkdir=is_new)
        return obstore, stores.from_url(
            f"{address.scheme}://{address.bucket}",
            retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRY_TIMEOUT},
            client_options={"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT, **_plain_http()},
            **store_options(address),
        )


def _plain_http() -> dict[str, Any]:
    return {"allow_http": True} if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true") else {}
