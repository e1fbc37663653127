// Says what was wrong without loading the page anew; without this the form works as well.
const form = document.querySelector("form");
const wrong = document.getElementById("wrong");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  wrong.textContent = "";
  try {
    const body = new URLSearchParams(new FormData(form));
    const answer = await fetch("/login", { method: "POST", body });
    if (answer.ok && answer.redirected) location.assign(`/${location.hash}`);
    else {
      wrong.textContent = answer.status === 403 ? "This is not the token." : "hvdtrain serve refuses it.";
      form.token.select();
    }
  } catch {
    wrong.textContent = "hvdtrain serve does not answer.";
  }
});
