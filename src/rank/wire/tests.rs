//! Tests of `rank::wire`.

use super::*;

#[test]
fn frames_come_back_whole_or_not_at_all() {
    let bytes = frame(&"four words in JSON").unwrap();
    assert_eq!(read::<String>(&mut bytes.as_slice(), 100).unwrap(), "four words in JSON");
    for end in 0..bytes.len() {
        let mut part = bytes[..end].to_vec();
        assert!(read::<String>(&mut part.as_slice(), 100).is_err());
        assert!(take::<String>(&mut part, 100).unwrap().is_none() && part.len() == end);
    }
    let mut two = [bytes.clone(), bytes].concat();
    assert!(take::<String>(&mut two, 100).unwrap().is_some());
    assert!(take::<String>(&mut two, 100).unwrap().is_some() && two.is_empty());
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_anything_is_read() {
    let lie = u32::MAX.to_le_bytes();
    assert_eq!(read::<String>(&mut lie.as_slice(), 100).unwrap_err().kind(), ErrorKind::InvalidData);
    assert_eq!(take::<String>(&mut lie.to_vec(), 100).unwrap_err().kind(), ErrorKind::InvalidData);
}

#[test]
fn what_is_no_hello_is_known_by_its_first_bytes() {
    let error = read_first::<Answer>(&mut b"GET / HTTP/1.1\r\n\r\n".as_slice()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    let mut bytes = Vec::new();
    write_first(&mut bytes, &Answer::Welcome).unwrap();
    assert!(matches!(read_first(&mut bytes.as_slice()), Ok(Answer::Welcome)));
}

#[test]
fn values_keep_their_bits() {
    for count in [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3] {
        let mut values: Vec<f32> = (0..count).map(|at| at as f32 * 0.1).collect();
        values.extend([f32::INFINITY, -0.0, f32::from_bits(0x7fc0_1234)]);
        let mut bytes = Vec::new();
        write_values(&mut bytes, &values).unwrap();
        assert_eq!(bytes.len(), 4 * values.len());
        let back = read_values(&mut bytes.as_slice(), values.len()).unwrap();
        assert!(back.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn a_hello_is_checked_from_the_token_on() {
    let token = Token::random().unwrap();
    let hello = Hello::new(&token, 1, 4, Channel::Control);
    assert_eq!(hello.check(&token, 4), Ok(()));
    let misfit = |change: &dyn Fn(&mut Hello)| {
        let mut hello = hello.clone();
        change(&mut hello);
        match hello.check(&token, 4) {
            Err(Stranger::Misfit(text)) => text,
            other => panic!("{other:?}"),
        }
    };
    assert!(misfit(&|hello| hello.version = "0.0.7".to_owned()).contains("0.0.7"));
    assert!(misfit(&|hello| hello.protocol = 99).contains("protocol 99"));
    assert!(misfit(&|hello| hello.world = 8).contains("8 ranks"));
    assert!(misfit(&|hello| hello.rank = 4).contains("rank 4 of 4"));
    assert!(misfit(&|hello| hello.rank = 0).contains("rank 0 of 4"));
    let wrong = Hello { token: "x".repeat(32), version: "0.0.7".to_owned(), ..hello.clone() };
    assert_eq!(wrong.check(&token, 4), Err(Stranger::Token));
}
