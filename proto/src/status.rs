//! A server's account of itself, checked before it is shown.
//!
//! Guarantees: every text in it is escaped and cut, so that none commands a terminal or breaks a line of a log; there are no
//! more directories, listeners, counters and lines than a server has.

use crate::hello::shown;
use crate::limits::{MAX_LISTENERS, MAX_REFUSAL, MAX_SOFTWARE, MAX_STATUS, MAX_WORD};
use crate::reply::{ReplyError, check_outcome};
use crate::v1;

/// The account, with its texts as they can be shown.
///
/// # Errors
/// The server's refusal; `TooManyEntries`: there is more in it than any server has.
pub fn check_status_reply(mut reply: v1::StatusReply) -> Result<v1::StatusReply, ReplyError> {
    check_outcome(reply.outcome.as_ref())?;
    for (got, limit) in [
        (reply.directories.len(), MAX_STATUS),
        (reply.listeners.len(), MAX_LISTENERS),
        (reply.counters.len(), MAX_STATUS),
        (reply.degraded.len(), MAX_STATUS),
    ] {
        if got > limit {
            return Err(ReplyError::TooManyEntries { got, limit });
        }
    }
    let show = |text: &mut String, limit: usize| *text = shown(text, limit);
    show(&mut reply.node, MAX_SOFTWARE);
    show(&mut reply.software, MAX_SOFTWARE);
    show(&mut reply.publishing, MAX_REFUSAL);
    reply.degraded.iter_mut().for_each(|line| show(line, MAX_REFUSAL));
    reply.counters.iter_mut().for_each(|counter| show(&mut counter.name, MAX_WORD));
    for directory in &mut reply.directories {
        // The longest path that a system takes.
        show(&mut directory.path, 4096);
        show(&mut directory.state, MAX_WORD);
        show(&mut directory.reason, MAX_REFUSAL);
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::ok_outcome;

    fn hostile(text: &str) -> v1::StatusReply {
        let text = text.to_owned();
        v1::StatusReply {
            outcome: Some(ok_outcome()),
            node: text.clone(),
            software: text.clone(),
            publishing: text.clone(),
            degraded: vec![text.clone()],
            counters: vec![v1::Counter { name: text.clone(), value: 1 }],
            directories: vec![v1::DirectoryStatus {
                path: text.clone(),
                state: text.clone(),
                reason: text,
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn i11_no_text_of_a_status_commands_a_terminal_or_breaks_a_line() {
        let reply = check_status_reply(hostile("a\x1b]0;b\n\u{202e}c\r\u{9b}2J")).unwrap();
        let said = format!("{:#?}", reply);
        // What Debug would escape itself must not be there to begin with.
        for text in [&reply.node, &reply.software, &reply.publishing, &reply.degraded[0], &reply.counters[0].name]
            .into_iter()
            .chain([&reply.directories[0].path, &reply.directories[0].state, &reply.directories[0].reason])
        {
            assert_eq!(text, "a\\x1b]0;b\\x0a\\u{202e}c\\x0d\\u{9b}2J", "{said}");
        }
        let long = check_status_reply(hostile(&"x".repeat(1 << 20))).unwrap();
        assert!(long.directories[0].path.len() <= 4096 && long.software.len() <= MAX_SOFTWARE);
    }

    #[test]
    fn i6_a_status_of_more_than_any_server_has_is_refused() {
        let full = v1::StatusReply { degraded: vec![String::new(); MAX_STATUS + 1], ..hostile("") };
        let refused = check_status_reply(full).unwrap_err();
        assert!(matches!(refused, ReplyError::TooManyEntries { limit: MAX_STATUS, .. }), "{refused}");
        let refused = v1::StatusReply { outcome: None, ..hostile("") };
        assert!(matches!(check_status_reply(refused), Err(ReplyError::Refused(_))));
    }
}
