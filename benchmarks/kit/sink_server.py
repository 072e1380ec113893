"""An S3 server that drops what it gets, so that it takes next to nothing of the machine: it stands for one elsewhere.

Bodies of parts and of large objects are dropped by the kernel (MSG_TRUNC). Small objects are kept in memory. Keys and
sums are not checked: what a server really does is for the tests, which use SeaweedFS.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.kit.objects.service import S3Service

__all__ = ["sink_server"]

KEPT_NBYTES = 1 << 20
_PIECE_NBYTES = 4 << 20
_CRC_HEADER = "x-amz-meta-capd-crc32c"
_tags = itertools.count(1)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        # Path → size, bytes (None: dropped), entity tag, and the crc32c that came with it.
        self.objects: dict[str, tuple[int, bytes | None, str, str]] = {}
        # Upload → the bytes of its parts, and the crc32c that came with its beginning.
        self.uploads: dict[str, tuple[int, str]] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._dropped = bytearray(_PIECE_NBYTES)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_PUT(self) -> None:
        path, query = self._target()
        nbytes = int(self.headers.get("Content-Length", 0))
        if "partNumber" in query:
            self._drop(nbytes)
            before, crc = self.server.uploads[query["uploadId"]]
            self.server.uploads[query["uploadId"]] = (before + nbytes, crc)
            return self._answer(HTTPStatus.OK, etag=_new_tag())
        payload = self.rfile.read(nbytes) if nbytes <= KEPT_NBYTES else self._drop(nbytes)
        before = self.server.objects.get(path)
        match = self.headers.get("If-Match")
        if (self.headers.get("If-None-Match") == "*" and before) or (
            match is not None and (before is None or before[2] != match)
        ):
            return self._answer(HTTPStatus.PRECONDITION_FAILED)
        tag = _new_tag()
        self.server.objects[path] = (nbytes, payload, tag, self.headers.get(_CRC_HEADER, ""))
        return self._answer(HTTPStatus.OK, etag=tag)

    def do_POST(self) -> None:
        path, query = self._target()
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in query:
            name = _new_tag().strip('"')
            self.server.uploads[name] = (0, self.headers.get(_CRC_HEADER, ""))
            return self._xml(
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            )
        if "uploadId" in query:
            nbytes, crc = self.server.uploads.pop(query["uploadId"])
            tag = _new_tag()
            self.server.objects[path] = (nbytes, None, tag, crc)
            return self._xml(
                f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
            )
        assert "delete" in query, self.path
        return self._xml("<DeleteResult></DeleteResult>")

    def do_GET(self) -> None:
        path, query = self._target()
        if "uploads" in query:
            return self._xml("<ListMultipartUploadsResult></ListMultipartUploadsResult>")
        if "list-type" in query:
            return self._xml(self._listing(f"{path.rstrip('/')}/", query.get("prefix", "")))
        found = self.server.objects.get(path)
        if found is None:
            return self._answer(HTTPStatus.NOT_FOUND)
        return self._answer(HTTPStatus.OK, found[1] or b"", etag=found[2], nbytes=found[0], crc=found[3])

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        path, _ = self._target()
        self.server.objects.pop(path, None)
        self._answer(HTTPStatus.NO_CONTENT)

    def _target(self) -> tuple[str, dict[str, str]]:
        path, _, query = self.path.partition("?")
        return urllib.parse.unquote(path), dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

    def _drop(self, nbytes: int) -> None:
        """Drop a body: first what the buffer has, then from the socket, without a copy."""
        while nbytes and (held := min(nbytes, len(self.rfile.peek(1)))):  # type: ignore[attr-defined]
            nbytes -= len(self.rfile.read(held))
            if nbytes > _PIECE_NBYTES // 64:
                break
        while nbytes:
            nbytes -= self.connection.recv_into(self._dropped, min(nbytes, _PIECE_NBYTES), socket.MSG_TRUNC)

    def _listing(self, bucket: str, prefix: str) -> str:
        inside = "".join(
            f"<Contents><Key>{path.removeprefix(bucket)}</Key><Size>{nbytes}</Size><ETag>{tag}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path, (nbytes, _, tag, _) in sorted(self.server.objects.items())
            if path.startswith(bucket + prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{inside}</ListBucketResult>"

    def _xml(self, text: str) -> None:
        self._answer(HTTPStatus.OK, f'<?xml version="1.0"?>{text}'.encode())

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes = b"",
        *,
        etag: str = "",
        nbytes: int | None = None,
        crc: str = "",
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if nbytes is None else nbytes))
        self.send_header("Last-Modified", formatdate(usegmt=True))
        if etag:
            self.send_header("ETag", etag)
        if crc:
            self.send_header(_CRC_HEADER, crc)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _new_tag() -> str:
    return f'"{next(_tags):032x}"'


@contextlib.contextmanager
def sink_server() -> Iterator[tuple[S3Service, int]]:
    """Start the server as a process group, and end it. Yields the server and the group."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.kit.sink_server"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield S3Service(process.stdout.readline().strip()), process.pid
        finally:
            process.kill()


def main() -> None:
    server = _Server()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
