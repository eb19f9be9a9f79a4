"""What ``--help`` says."""

from __future__ import annotations

DESCRIPTION = """\
Exact, crash-safe resume for PyTorch Lightning.

Add the callback to your Trainer, and pass ckpt_path="last":

    from lightning_resume import AtomicResumeCallback

    trainer = Trainer(callbacks=[AtomicResumeCallback("checkpoints", every_n_train_steps=500)])
    trainer.fit(model, datamodule=data, ckpt_path="last")
"""

EXAMPLES = """\
examples:
  lightning-resume demo                      kill a real job three times, and see that nothing is lost
  lightning-resume list checkpoints          which checkpoints are there, and which are damaged
  lightning-resume verify checkpoints        read every byte of them, and compare with the digests
  lightning-resume prune checkpoints --keep-last 2    delete all but the newest two of a run
  lightning-resume migrate checkpoints       rewrite those of an older schema, in place
"""

JSON = """\
json: a list with an object for each checkpoint: status ("good", "incomplete", "corrupt", "foreign" or "missing"), kind,
      timeline, global_step, current_epoch, batch_in_epoch, num_bytes, run_id, is_verified (whether every byte was read
      and compared: tables call a good one that was not "committed"), path, reason; null where unknown"""

DEMO = """\
Trains a small convolutional net on scikit-learn's handwritten digits, twice, side by side: a baseline that is left
alone and does not have the callback, and a run with the callback that is killed (SIGKILL, workers included) at random
moments and started again each time as a new process, with another seed on purpose.

Then everything is compared bit by bit: weights, optimizer, schedule, random streams, and for every batch its items, its
loss and its learning rate. Expect less than a minute on two cores, and a largest difference of 0.0 in every row.

Writes resume-demo.json and, with matplotlib installed, resume-demo.png: both loss curves, one on top of the other.
"""

DEMO_EXAMPLES = """\
examples:
  lightning-resume demo
  lightning-resume demo --seed 7                     the same batches to die in each time
  lightning-resume demo --kills 5 --output-dir out   more kills, other folder
  lightning-resume demo --stock                      the same with Lightning's ModelCheckpoint: not exact
  lightning-resume demo --keep
  lightning-resume list resume-demo-work/interrupted/checkpoints    what the one before left behind

exit status: 0 the runs are bit-equal, 1 they are not, 2 the demo could not be carried out
"""

LIST = """\
Lists the checkpoints in a folder, oldest first, with what is left of unfinished saves. Reads each index and looks at
the sizes of the files, so it is quick however large they are. What passes is called committed; "verify" reads the
files too, and calls good what passes that.
"""

LIST_EXAMPLES = f"""\
examples:
  lightning-resume list checkpoints
  lightning-resume list checkpoints --json | python -m json.tool

{JSON}
exit status: 0; 1 when a checkpoint is damaged; 2 when the command line is wrong, or there is no such folder
"""

VERIFY = """\
Reads every file of the checkpoints and compares sizes and SHA-256 digests with their indexes. Changes nothing, and
runs no code from them. A PATH is one checkpoint, or a folder of checkpoints; what an unfinished save left in such a
folder is no fault, since resuming never looks at it.
"""

VERIFY_EXAMPLES = f"""\
examples:
  lightning-resume verify checkpoints/step-00000500
  lightning-resume verify run-*/checkpoints --json

{JSON}
exit status: 0 when all are good; 1 when one is damaged, or a PATH has no checkpoint; 2 when the command line is wrong
"""

PRUNE = """\
Deletes old checkpoints of one run: all but the newest K full ones that are named after their step. What stays in any
case: the newest one that passes a full verification, archived ones (--archive-every), weights-only ones, those of other
runs, and whatever else is in the folder. Each one is renamed out of sight before it is deleted.
"""

PRUNE_EXAMPLES = f"""\
examples:
  lightning-resume prune checkpoints --keep-last 2 --dry-run     see what would be deleted
  lightning-resume prune checkpoints --keep-last 2
  lightning-resume prune checkpoints --keep-last 1 --archive-every 1000

{JSON}
      and action: "deleted", "kept", "failed", or with --dry-run "to delete"
exit status: 0; 1 when one could not be deleted, the run has no good one, or a training writes to the folder; 2 when the
command line is wrong, or there is no such folder
"""

MIGRATE = """\
Rewrites checkpoints of an older schema in the newest one, in place. Each is verified in full first; a kill at any
moment leaves the old one or the new one. A PATH is one checkpoint, or a folder of checkpoints.
"""

MIGRATE_EXAMPLES = f"""\
examples:
  lightning-resume migrate checkpoints
  lightning-resume migrate best.ckpt --json

{JSON}
      and action: "migrated", "kept" (it is of the newest schema), or "failed"
exit status: 0 when all are of the newest schema now; 1 when one is damaged or could not be rewritten, a PATH has no
checkpoint, or a training writes to its folder; 2 when the command line is wrong
"""
