#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""perftest's ib_write_bw, played: two ends that meet over TCP, and the table that they print.

The file that PLAYED_ADAPTERS names says what an adapter gives: its rate, or the words with which
it fails. With PLAYED_GPUDIRECT it knows `--use_cuda`. PLAYED_CALLS gets the words of each call.
"""

import argparse
import json
import os
import socket
import sys
from pathlib import Path

parser = argparse.ArgumentParser(prog="ib_write_bw")
parser.add_argument("-d", "--ib-dev", required=True)
parser.add_argument("-p", "--port", type=int, default=18515)
parser.add_argument("-s", "--size", type=int, default=65536)
parser.add_argument("-n", "--iters", type=int, default=5000)
parser.add_argument("-x", "--gid-index", type=int)
parser.add_argument("-F", "--CPU-freq", action="store_true")
parser.add_argument("--report_gbits", action="store_true")
if "PLAYED_GPUDIRECT" in os.environ:
    parser.add_argument("--use_cuda", type=int)
parser.add_argument("server", nargs="?")
options = parser.parse_args()

with Path(os.environ["PLAYED_CALLS"]).open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\n")
rate = json.loads(Path(os.environ["PLAYED_ADAPTERS"]).read_text())[options.ib_dev]
if isinstance(rate, str):
    sys.exit(f" Port number 1 state is Down\n {rate}")
if options.server is None:
    with socket.create_server(("", options.port)) as server:
        connection, _ = server.accept()
else:
    connection = socket.create_connection((options.server, options.port))
with connection:
    connection.sendall(b"done")
    connection.recv(4)
LINE = "-" * 87
print(LINE, "                    RDMA_Write BW Test", sep="\n")
print(f" Dual-port       : OFF\t\tDevice         : {options.ib_dev}")
print(f" local address: LID 0x01 QPN 0x0127 PSN 0x9a0f2a\n{LINE}")
print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
if options.server is not None:
    print(
        f" {options.size}    {options.iters}             {rate + 0.5:.2f}             {rate:.2f}",
        end="",
    )
    print("   		     0.005890")
print(LINE)
