// Asks for a report again, as this server's own page. Once only: a browser that still says otherwise shows the sentence.

const [NAME, SOON_MS] = ["capd-web-again", 2000];
if (!(Date.now() - Number(sessionStorage.getItem(NAME)) < SOON_MS)) {
  sessionStorage.setItem(NAME, String(Date.now()));
  location.reload();
}
