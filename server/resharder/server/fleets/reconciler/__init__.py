"""How one server gets to the version it should serve: a pure function of its state, what happened and the time.

`step(server, event, now, settings)` gives the new state and the orders to send. One install goes

    STAGE -> every worker STAGED -> CLOSE (others), APPLY (leader) -> leader done and every worker APPLIED -> RESUME (all)

and each arrow is idempotent: after any interruption the same order is given again, under the same install id. From APPLY until
that install, or another, is confirmed in full the workers count as torn, and a server with a torn worker is never resumed; it
gets its last confirmed version again, staged and applied like any other, or stays closed. Reports that are late or repeated are
told by the install id, which is new for every attempt and every life of the daemon, and by the workers' process nonces.

Numbers start again with a new store, while servers live on. So a worker says the fingerprint of what it holds too, and one whose
fingerprint is not that of the READY version of that number counts as EMPTY.

A worker that finds other contents in its memory than its version gives (another hand's RPC) says FAILED with the verification: it
counts as torn, and what is torn goes the way above.

What its fleet wants of a server is its `Goal`: which version, whether it may go on from staged to applied, which versions it may
open its gate on, whether it may open it at all (drained), and how awake it is. Power changes go

    asleep  <- SLEEP -  awake          gate closed first; at level 2 the workers count as torn from the order on
    asleep  - WAKE weights ->  weights awake  - [an install, if one is wanted or the weights were dropped] - WAKE all ->  awake

so that an install wanted while asleep happens at wake, and nothing is served from weights that were dropped.

A version that every rank has offered for the direct path may be installed before it is READY, where the fleet serves ahead: by a
server that serves a READY one, which its workers keep at hand (STAGE says which), once, and over the direct path alone. What
fails goes the way of every failure: the last confirmed version again. Workers hold it by a fingerprint of the daemon's making
until it is READY and they have compared it with the store's copy; one that finds a difference says so, and the version is
installed from the store. What became ABORTED is never served anew, and served on only until its successor is staged.

Leadership is numbered. Each LEAD begins a higher `term`, which goes with every order, and the engine refuses orders of lower ones
than it has seen: a leader that was stopped, and let go meanwhile, changes nothing when it goes on.

What the plugin has to keep to: it carries out one order at a time and drops what it has not begun when its stream breaks; a
control side that attaches in the middle of an order names that order's install in its first report, and gets no others until it
has reported how that one went; an order repeated is answered without harm; a worker that failed to apply says FAILED until it
succeeds.
"""
