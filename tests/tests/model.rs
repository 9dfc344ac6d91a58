//! The model test without a kernel, its reference against a plain directory, and that it notices what it must notice.

#![forbid(unsafe_code)]

use railfs_tests::model::bare::{Bare, fast_directory};
use railfs_tests::model::plain::Plain;
use railfs_tests::model::sequences::Plan;
use railfs_tests::model::steps::{Place, Step, When};
use railfs_tests::model::{Subject, run};

/// Sequences of the tests without a kernel, instead of the usual number.
const COUNT: &str = "RAILFS_MODEL_SEQUENCES";

#[test]
fn i3_random_sequences_match_the_model() {
    let plan = Plan::new(COUNT, 2000, 50_000, 4, 400);
    let one = |subject: &mut Bare, steps: &[Step]| {
        subject.begin();
        run(steps, subject)
    };
    plan.run(COUNT, Bare::new, one, Bare::end);
}

#[test]
fn the_model_says_what_a_plain_directory_does() {
    let plan = Plan::new(COUNT, 1000, 10_000, 2, 1000);
    let one = |subject: &mut Plain, steps: &[Step]| {
        subject.begin()?;
        run(steps, subject)
    };
    plan.run(COUNT, |_| Plain::new(&fast_directory()), one, drop);
}

fn put(name: usize) -> Step {
    Step::Put { name, size: 15, width: 2, when: When::Always }
}

#[test]
fn i2_the_model_notices_a_byte_that_changed_on_disk() {
    let mut subject = Bare::new(0);
    let read = Step::Read { descriptor: 0, place: Place::Start, length: 100 };
    let steps = [put(0), Step::Open { descriptor: 0, name: 0 }, read];
    subject.begin();
    run(&steps, &mut subject).unwrap();
    for place in 1..=2 {
        let mut damaged = steps.to_vec();
        damaged.insert(place, Step::Damage { name: 0 });
        subject.begin();
        let why = run(&damaged, &mut subject).unwrap_err();
        assert!(why.starts_with("step 3, Read") && why.contains("Input/output error"), "{why}");
        subject.close(0);
        subject.quiet().unwrap();
    }
    // What lies in other pages is right all the same.
    subject.begin();
    let elsewhere = Step::Read { descriptor: 0, place: Place::Before(20_000), length: 20_000 };
    run(&[put(0), Step::Damage { name: 0 }, Step::Open { descriptor: 0, name: 0 }, elsewhere], &mut subject).unwrap();
    subject.end();
}
