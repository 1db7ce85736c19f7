"""The live page of a run over HTTP: one page and one JSON, nothing else; no file has an address."""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from treeprop_ray.errors import UserError, first_line, warn
from treeprop_ray.reporting.live import Live
from treeprop_ray.reporting.templates import render

# the page may load nothing from elsewhere, and its address (with the token) goes nowhere
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Answers while `serve_forever` runs."""

    daemon_threads = True

    def __init__(self, live: Live, host: str, port: int) -> None:
        """Listen; UserError where that is not possible."""
        self.live, self.lock = live, threading.Lock()
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(16)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as e:
            reason = getattr(e, "strerror", None) or str(e)
            raise UserError(f"host={host} port={port}: cannot listen there: {reason}") from e

    @property
    def url(self) -> str:
        """What to open in a browser; with the token, if one is asked for."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if ipaddress.ip_address(host).is_unspecified:  # all addresses of this machine
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/" + (f"?token={self.token}" if self.token else "")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who has gone is no error; anything else is one line."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            warn(f"{type(error).__name__}: {first_line(error)}")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version, sys_version = "treeprop", ""
    timeout = 30

    def do_GET(self) -> None:
        """The page, or how the run stands."""
        address = urlsplit(self.path)
        words = {key: values[-1] for key, values in parse_qs(address.query).items()}
        if not self._admitted(words.get("token", "")):
            return
        if address.path == "/":
            self._page()
        elif address.path == "/data":
            self._data(words)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "no such page\n")

    def _admitted(self, token: str) -> bool:
        """The token, where one is asked for; on loopback only those who name this machine, lest a
        foreign page with a name of its own for 127.0.0.1 reads along."""
        if self.server.token:
            if hmac.compare_digest(token.encode(), self.server.token.encode()):
                return True
            told = "a token is needed: open the address that `treeprop watch` has printed\n"
        else:
            if is_loopback(named(self.headers.get("Host", ""))):
                return True
            told = "open the address that `treeprop watch` has printed\n"
        self._answer(HTTPStatus.FORBIDDEN, "text/plain", told)
        return False

    def _page(self) -> None:
        live = self.server.live
        text = render("watch.html", name=live.folder.name, run=live.run)
        self._answer(HTTPStatus.OK, "text/html", text)

    def _data(self, words: dict[str, str]) -> None:
        known = words.get("known", "")
        count = int(known) if known.isdecimal() and len(known) < 16 else 0
        with self.server.lock:
            now = self.server.live.now(words.get("place", ""), count, words.get("waves", ""))
        self._answer(HTTPStatus.OK, "application/json", json.dumps(now, allow_nan=False))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        for key, value in HEADERS.items():
            self.send_header(key, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *words: object) -> None:
        """Nothing: an address may hold the token."""


def named(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
