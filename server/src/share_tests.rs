//! Directories that hang, by hand: work that waits until the test lets it go.

use super::*;
use std::sync::mpsc;

fn share() -> Arc<Share> {
    Share::new(Id([7; 16]), "/srv/disk7".to_owned(), Clock::start())
}

fn at(seconds: u64) -> Time {
    Time::default().after(Duration::from_secs(seconds))
}

#[test]
fn i9_a_share_that_is_used_up_and_gives_nothing_back_is_silent_and_a_busy_one_is_not() {
    let mut book = Book::default();
    let tickets: Vec<u64> = (0..SHARE as u64).map(|_| book.enter(at(1))).collect();
    assert_eq!(book.silent(at(3)), None);
    let why = book.silent(at(4)).unwrap();
    assert!(why.contains("does not answer: 16 requests wait") && why.contains("3 s"), "{why}");
    assert!(matches!(book.news(at(4)), Some(Ok(_))) && book.news(at(5)).is_none());
    // One comes back, another takes its place: it works.
    book.leave(tickets[3]);
    assert_eq!((book.news(at(5)), book.silent(at(9))), (Some(Err(())), None));
    book.enter(at(9));
    assert_eq!(book.silent(at(11)), None);
    assert!(book.silent(at(12)).unwrap().contains("for 11 s"));
    // A look that hangs says the same of one that nobody reads.
    let mut idle = Book { look: Some(at(2)), ..Book::default() };
    assert!(idle.silent(at(4)).is_none() && idle.news(at(5)).is_some());
    assert_eq!(threads(3), 64 + 3 * 18);
    assert_eq!(threads(1 << 40), threads(1024));
}

#[test]
fn i9_a_directory_that_hangs_holds_its_own_share_of_threads_and_no_other() {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).max_blocking_threads(SHARE + 4).enable_all().build().unwrap();
    let (hung, well) = (share(), share());
    let (let_go, held) = mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    runtime.block_on(async {
        // Who asked gave up: the threads are inside all the same.
        let soon = Duration::from_millis(1);
        for round in 0..3 * SHARE {
            let held = Arc::clone(&held);
            let refused = hung.run(soon, move || _ = lock(&held).recv()).await.unwrap_err();
            let says = refused.message.contains("/srv/disk7") && refused.message.contains("does not answer");
            assert!(says && refused.code == Code::Unavailable, "{round}: {}", refused.message);
        }
        assert_eq!(lock(&hung.book).inside.len(), SHARE);
        assert_eq!(lock(&hung.book).waiting, 0);
        for round in 0..20 {
            assert_eq!(well.run(WAIT, move || round).await.unwrap(), round);
        }
        // A line that is as long as it may be: who comes then is refused at once.
        lock(&hung.book).waiting = LINE;
        let refused = hung.run(WAIT, || ()).await.unwrap_err();
        assert!(refused.message.contains("requests wait") && refused.code == Code::Unavailable, "{}", refused.message);
        lock(&hung.book).waiting = 0;
        drop(let_go);
        // Refused only as long as it counts as one that does not answer.
        while hung.run(WAIT, || ()).await.is_err() {
            tokio::task::yield_now().await;
        }
        assert!(hung.silent().is_none());
    });
}
