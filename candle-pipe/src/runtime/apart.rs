//! Splits overlapped pairs into single computations.
use crate::schedule::Action;
use itertools::Itertools;

/// Returns the actions of a rank with each pair split, each half followed by its own messages: the messages of the
/// first half need not wait for the second.
pub(super) fn apart(actions: &[Action]) -> Vec<Action> {
    let mut apart = Vec::with_capacity(actions.len());
    let mut left = actions.iter().copied().peekable();
    while let Some(action) = left.next() {
        let Action::Overlap([first, second]) = action else {
            apart.push(action);
            continue;
        };
        let sends = left.peeking_take_while(|action| matches!(action, Action::Send(_)));
        let is_of_first =
            |action: &Action| matches!(action, Action::Send(message) if message.is_made_by(first));
        let (of_first, of_second): (Vec<_>, Vec<_>) = sends.partition(is_of_first);
        apart.push(Action::Compute(first));
        apart.extend(of_first);
        apart.push(Action::Compute(second));
        apart.extend(of_second);
    }
    apart
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::apart;
    use crate::schedule::Action;

    #[test]
    fn halves_have_their_messages_behind_them() {
        let parse =
            |text: &str| text.split(',').map(|action| action.parse().unwrap()).collect::<Vec<Action>>();
        let list = "1RECV_F3,(1F3;6B0)OVERLAP_F_B,1SEND_F3,1SEND_F3>4,6SEND_B0,1RECV_F4,1F4,1SEND_F4";
        let want = "1RECV_F3,1F3,1SEND_F3,1SEND_F3>4,6B0,6SEND_B0,1RECV_F4,1F4,1SEND_F4";
        assert_eq!(apart(&parse(list)), parse(want));
    }
}
