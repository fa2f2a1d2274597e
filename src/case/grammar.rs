//! The grammar `NAME=REQS`: REQS is a comma list of `[N*]Q[@K][c][:D]`.
//!
//! The first `=` splits; a text without one is its own name. Spaces around an item are allowed. `Display` writes equal
//! neighbours as one item `N*…` and reads back as the same case, provided that the name has no `=` (names from shape
//! files may).

use std::fmt;
use std::str::FromStr;

use super::{Case, CaseError, MAX_REQUESTS, Request};

impl FromStr for Case {
    type Err = CaseError;

    fn from_str(text: &str) -> Result<Self, CaseError> {
        let (name, list) = text.split_once('=').unwrap_or((text, text));
        if name.is_empty() && !text.is_empty() {
            return Err(CaseError::EmptyName);
        }
        if list.trim().is_empty() {
            return Err(CaseError::NoRequests);
        }
        let mut requests = Vec::new();
        for item in list.split(',') {
            let (count, request) = parse_item(item.trim(), requests.len())?;
            requests.resize(requests.len() + count, request);
        }
        Case::new(name, requests)
    }
}

/// The count and the request of one item; `before` requests stand before it.
fn parse_item(item: &str, before: usize) -> Result<(usize, Request), CaseError> {
    let syntax = |what: &str| CaseError::Syntax { item: item.into(), what: what.into() };
    if item.is_empty() {
        return Err(syntax("there is nothing between two commas or at an end, so take a comma out"));
    }
    let mut rest = item;
    let mut count = None;
    let mut query = digits(&mut rest).ok_or_else(|| syntax("it does not begin with a digit 0-9"))?;
    if take(&mut rest, '*') {
        count = Some(query);
        query = digits(&mut rest).ok_or_else(|| syntax("a query length must follow `*`"))?;
    }
    let kv = match take(&mut rest, '@') {
        true => digits(&mut rest).ok_or_else(|| syntax("a KV length must follow `@`"))?,
        false => query,
    };
    let chunked = take(&mut rest, 'c');
    let drafts = match take(&mut rest, ':') {
        true => digits(&mut rest).ok_or_else(|| syntax("a number of draft tokens must follow `:`"))?,
        false => "0",
    };
    if let Some(found) = rest.chars().next() {
        return Err(syntax(&format!("{found:?} is not expected there")));
    }
    let number = |digits: &str| {
        digits.parse().map_err(|_| CaseError::TooLarge { item: item.into(), number: digits.into() })
    };
    let request = Request::new(number(query)?, number(kv)?, number(drafts)?, chunked)
        .map_err(|rule| CaseError::Request { item: item.into(), rule })?;
    Ok((count.map_or(Ok(1), |count| parse_count(count, item, before))?, request))
}

/// The count `digits`, so that it and the `before` requests are within [`MAX_REQUESTS`].
fn parse_count(digits: &str, item: &str, before: usize) -> Result<usize, CaseError> {
    let found = match digits.parse::<u64>() {
        Ok(0) => return Err(CaseError::ZeroCount { item: item.into() }),
        Ok(count) => u128::from(count) + before as u128,
        Err(_) => u128::MAX,
    };
    match usize::try_from(found) {
        Ok(total) if total <= MAX_REQUESTS => Ok(total - before),
        _ if found == u128::MAX => {
            Err(CaseError::TooManyRequests { item: item.into(), found: "over 10^19".into() })
        }
        _ => Err(CaseError::TooManyRequests { item: item.into(), found: found.to_string() }),
    }
}

/// Takes the ASCII digits at the start of `rest`; `None` if there are none.
fn digits<'a>(rest: &mut &'a str) -> Option<&'a str> {
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, after) = rest.split_at(end);
    *rest = after;
    (end > 0).then_some(digits)
}

/// Takes `mark` from the start of `rest`, if it is there.
fn take(rest: &mut &str, mark: char) -> bool {
    rest.strip_prefix(mark).map(|after| *rest = after).is_some()
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=", self.name)?;
        for (i, run) in self.requests.chunk_by(PartialEq::eq).enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let count = if run.len() > 1 { format!("{}*", run.len()) } else { String::new() };
            write!(f, "{comma}{count}{}", run[0])?;
        }
        Ok(())
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.query_len)?;
        if self.kv_len != self.query_len {
            write!(f, "@{}", self.kv_len)?;
        }
        if self.chunked {
            f.write_str("c")?;
        }
        if self.num_draft_tokens > 0 {
            write!(f, ":{}", self.num_draft_tokens)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        text.parse::<Case>().expect_err(text).to_string()
    }

    #[test]
    fn runs_of_equal_requests_are_written_once() {
        let shown = |text: &str| text.parse::<Case>().map(|case| case.to_string());
        assert_eq!(shown("a=1@8, 2*1@8 ,4@8:3,7@9c,5@5").as_deref(), Ok("a=3*1@8,4@8:3,7@9c,5"));
        assert_eq!(shown("64*1@8192").as_deref(), Ok("64*1@8192=64*1@8192"));
    }

    #[test]
    fn an_error_names_the_item_and_what_to_change() {
        assert_eq!(
            error("a=8,4@3"),
            "item \"4@3\" has a KV length of 3 with a query length of 4: the KV length includes the query, so give 4 or more"
        );
        assert_eq!(
            error("a=4@8:2"),
            "item \"4@8:2\" has 2 draft tokens with a query length of 4: a verify request's query is one token plus the \
             drafts, so the query length must be 3"
        );
        assert_eq!(error("a=8@16C"), "item \"8@16C\" is not [N*]Q[@K][c][:D]: 'C' is not expected there");
        assert_eq!(
            error("x=y=8"),
            "item \"y=8\" is not [N*]Q[@K][c][:D]: it does not begin with a digit 0-9"
        );
        assert_eq!(error("=8"), CaseError::EmptyName.to_string());
        assert_eq!(error(""), CaseError::NoRequests.to_string());
        assert_eq!(error("a= "), CaseError::NoRequests.to_string());
        for text in [
            "a=٣", "a=1²", "a=8,", "a=,8", "a=*8", "a=8@", "a=8@16:", "a=8:x", "a=2**8", "a=-1", "a=1.5",
            "a=+1",
        ] {
            assert!(error(text).contains("is not [N*]Q[@K][c][:D]"), "{text}");
        }
    }

    #[test]
    fn huge_counts_and_lengths_are_refused_without_allocating() {
        for text in ["a=1000000000000*1@8", "a=4294967295*1@8", "a=65537*1@8", "a=65536*1@8,1*1@8"] {
            assert!(error(text).contains("at most 65536"), "{}", error(text));
        }
        assert!(error(&format!("a={}*1@8", "9".repeat(1000))).contains("over 10^19 requests"));
        assert!(error("a=0*1@8").contains("0 times"));
        assert!(error("a=4294967296").contains("too large: lengths go up to 4294967295"));
        assert!(error(&"9".repeat(1 << 20)).len() < 300, "a long item is cut in the message");
        assert!("a=65536*1@8".parse::<Case>().is_ok());
    }

    #[test]
    fn a_plain_item_past_the_cap_is_refused_too() {
        let text = vec!["1@8"; MAX_REQUESTS + 1].join(",");
        assert!(error(&text).contains("at most 65536"), "{}", error(&text));
    }
}
