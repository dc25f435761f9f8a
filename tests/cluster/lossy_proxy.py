"""`python lossy_proxy.py PEM ADDRESS PORT SERVER_PORT LOSE`: an HTTPS way to the MLflow server of the same address.

Every request is handed on. Of the first 2 * LOSE requests that create a run every other answer is lost, and of those
that create an experiment likewise: the server has done what the client asks for again. One line on stdout for each.
"""

from __future__ import annotations

import http.client
import itertools
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

pem, address, port, server_port, lose = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
trusted = ssl.create_default_context(cafile=pem)
creations = {"experiments/create": itertools.count(), "runs/create": itertools.count()}


class Handler(BaseHTTPRequestHandler):
    def hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = http.client.HTTPSConnection(address, server_port, context=trusted)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
        server.request(self.command, self.path, body, headers)
        answer = server.getresponse()
        content = answer.read()
        counting = creations.get(self.path.partition("/mlflow/")[2])
        number = next(counting) if counting else 1
        if number < 2 * lose and number % 2 == 0:
            print("lost the answer to", self.path, flush=True)
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "server", "date"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = hand_on

    def log_message(self, *arguments: object) -> None:
        pass


server = ThreadingHTTPServer((address, port), Handler)
with_key = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
with_key.load_cert_chain(pem)
server.socket = with_key.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()
