//! The model test over a real mount.

#![forbid(unsafe_code)]

use railfs_tests::model::mounted::Mounted;
use railfs_tests::model::run;
use railfs_tests::model::sequences::Plan;
use railfs_tests::model::steps::Step;
use railfs_tests::need_mount;

/// Sequences, instead of the usual number.
const COUNT: &str = "RAILFS_MODEL_MOUNT_SEQUENCES";
/// The mounts that a run goes through, one after another.
const OPTIONS: [&str; 4] = [
    "io=direct,metadata_ttl=0s,arena=8MiB",
    "io=cached,metadata_ttl=0s,arena=8MiB",
    "mode=snapshot,metadata_ttl=0s,arena=8MiB",
    "io=direct,metadata_ttl=0s,arena=8MiB,threads=1,readahead=0",
];

#[test]
fn i3_random_sequences_on_a_mount_match_the_model() {
    need_mount!("i3_random_sequences_on_a_mount_match_the_model");
    let plan = Plan::new(COUNT, 200, 3000, 4, 200);
    let one = |subject: &mut Mounted, steps: &[Step]| {
        subject.begin();
        run(steps, subject)
    };
    plan.run(COUNT, |_| Mounted::new(&OPTIONS), one, Mounted::end);
}
