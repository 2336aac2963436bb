"""Parts of `scripts/check_load.py` and `scripts/check_fuzz.py`.

servers      `semgrad-guard serve` as a process that is watched, stopped and killed
small_model  a model that is fast, for checks that do not depend on a model's knowledge
clients      clients of both kinds: those that wait for an answer, and those that mean it ill
scripted     another server, whose every draft carries a nonce, or a fault
saturation   clients at the limit: no lost, mixed or duplicated answer, memory flat, queue bounded
nonces       no nonce of a withheld draft anywhere
faults       killed, ended, without a disk, a database or an upstream
results      checks and their results
"""
