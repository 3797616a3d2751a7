"""Fault campaign: zinfer under kills, failing disks, little memory and second writers.

It is judged by what a user would lose.

`python -m tools.campaign --seed 1 --count 20` runs 20 cases of each class, prints a table, and with ``-o FILE`` appends
a record. Modules, each of which imports only from those above it:

    shim        faults of a disk: full, failing, read-only, vanishing, or a kill at the n-th operation; and an audit of
                the order of writes and syncs (shim.c)
    subject     zinfer in a process of its own
    clients     clients of a server
    judge       the verdicts: exit code, words on the terminal, points, answers, files and processes left behind
    lab         the model, records and undisturbed runs that the cases compare with
    verbs       the commands under test, and what is compared of each
    kills, disks, serve     the classes of cases
    record      the record of a campaign, and the table of docs/reliability.md
"""
