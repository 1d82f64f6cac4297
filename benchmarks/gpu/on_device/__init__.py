# SPDX-License-Identifier: Apache-2.0
"""What runs in the interpreter with torch, which has nothing else of ours and may be older.

events        what a process says, apart from what libraries print
describe      the devices and versions
exchange      a probe that exchanges data for a while, with a fault where it is told to
cycles        a process group, formed and left again and again
hold          memory that is held until the process is killed
watch         how much memory is in use
first_use     what is slow the first time
flip          one wrong bit in a product
"""
