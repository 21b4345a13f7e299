"""Decision about one server: a pure function of its state, an event and the time.

`step(server, event, now, settings)` returns the new state and the orders to send. One install is

    STAGE -> every worker STAGED -> CLOSE (others), APPLY (leader) -> leader done and every worker APPLIED -> RESUME (all)

Each arrow is idempotent: after an interruption the same order is sent again, under the same install id. From APPLY until
that install, or another one, is confirmed in full, the workers count as torn. A server with a torn worker never resumes: it
gets its last confirmed version again, staged and applied like any other, or stays closed. Late and repeated reports are
recognised by the install id, which is new for every attempt and every lifetime of the daemon, and by the workers' process
nonces.

Numbers restart with a new store, while servers keep running. A worker therefore reports the fingerprint of its version as
well; a worker whose fingerprint is not that of the READY version of that number counts as EMPTY.

A worker that finds a difference in its memory, for example after an RPC by another program, reports FAILED with the
verification. It counts as torn and is repaired in the same way.

A server's `Goal` comes from its fleet: the version, whether it may proceed from staged to applied, the versions on which its
gate may open, whether the gate may open at all (drained), and its power state. Changes of power are

    asleep  <- SLEEP -  awake          gate closed first; at level 2 the workers count as torn from the order on
    asleep  - WAKE weights ->  weights awake  - [an install, if due or if the weights were dropped] - WAKE all ->  awake

so that an install that becomes due during sleep happens at wake, and nothing is served from dropped weights.

In a fleet that serves ahead, a version that every rank has offered for the direct path may be installed before it is READY: by a
server that serves a READY one, which its workers stage as well (STAGE names it), once, and over the direct path only. A
failure leads back to the last confirmed version, as for any install. Workers report such a version by a fingerprint that the
daemon derives, until it is READY and compared with the store's copy; if a worker finds a difference, the version is installed
from the store. A version that becomes ABORTED is not served again, and stays in service only until its successor is staged.

Leadership is numbered. Each LEAD begins a higher `term`, which accompanies every order. The engine refuses orders of lower terms
than the highest it has seen, so a leader that was stopped and replaced changes nothing when it continues.

The plugin guarantees: it executes one order at a time and drops orders that it has not begun when its stream breaks; a
control side that attaches during an order names that order's install in its first report and gets no others until it
has reported the outcome; a repeated order has no further effect; a worker that failed to apply reports FAILED until it
succeeds.
"""
