//! I11: what is degraded is shown, with the reason.

use railfs_engine::clock::Time;
use railfs_engine::rail::State;
use railfs_engine::read::rails::Rails;

#[test]
fn i11_a_rail_that_is_not_up_says_so_and_why() {
    let mut rails = Rails::default();
    let rail = rails.add("a 10.0.0.1:7421");
    let shown = |rails: &Rails| {
        let (state, reason, ..) = rails.describe(rail, Time(5));
        (state, reason)
    };
    let is = |state: &str, reason: &str| (state.to_owned(), reason.to_owned());
    assert_eq!(shown(&rails), is("connecting", "no connection yet"));
    rails.state(rail, State::Up);
    assert_eq!(shown(&rails), is("up", ""));
    rails.state(rail, State::Silent);
    assert_eq!(shown(&rails), is("suspect", "silent"));
    rails.state(rail, State::Down("no route to host".to_owned()));
    assert_eq!(shown(&rails), is("down", "no route to host"));
    // Trying again is not being better.
    rails.state(rail, State::Connecting);
    assert_eq!(shown(&rails), is("down", "no route to host"));
}
