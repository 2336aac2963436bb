"""What `scripts/check_load.py` and `scripts/check_fuzz.py` are made of.

servers      `semgrad-guard serve` as a process that is watched, stopped and killed
small_model  a model that is fast, for checks that are not about what a model knows
clients      clients of both kinds: those that wait for an answer, and those that mean it ill
scripted     another server, whose every draft carries a nonce, or a fault
saturation   clients at the limit: no lost, mixed or duplicated answer, memory flat, queue bounded
nonces       no nonce of a withheld draft anywhere
faults       killed, ended, without a disk, a database or an upstream
results      what was checked, and what was found
"""
